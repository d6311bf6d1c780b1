"""Classes of kernel values: constructors made from fields."""

import pytest
from triton.experimental.gluon import language as gl

from echokernels._gluon_compat import aggregate


def make(**fields):
    return aggregate(type("Values", (), {"__annotations__": fields}))


def test_fields_are_set_in_their_order():
    values = make(first=gl.constexpr, second=gl.constexpr)(1, 2)
    assert (values.first.value, values.second.value) == (1, 2)
    assert isinstance(values.first, gl.constexpr)


def test_a_value_of_another_type_is_refused():
    with pytest.raises(TypeError, match="second"):
        make(first=gl.constexpr, second=gl.tensor)(1, 2)


def test_kernels_that_use_a_class_depend_on_its_fields():
    """Else a compiled kernel would be found again after fields changed places."""

    def key(**fields):
        (constructor, *_) = make(**fields).hash_attrs
        return constructor.cache_key

    here = key(first=gl.tensor, second=gl.tensor)
    assert here == key(first=gl.tensor, second=gl.tensor)
    assert here != key(second=gl.tensor, first=gl.tensor)
    assert here != key(first=gl.tensor, second=gl.constexpr)
