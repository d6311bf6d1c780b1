"""Measurements of the ops and of the runtime, beside others and beside what the hardware can do."""
