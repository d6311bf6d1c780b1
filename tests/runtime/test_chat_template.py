"""Chat templates: what they may use, what they may not, and messages of another form."""

import datetime

import pytest

from echokernels.runtime.chat_template import ChatTemplate

USER = {"role": "user", "content": "hi"}
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

# Every line that has only a block tag must leave no trace, neither its indentation nor its end.
TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {% if message.role == 'system' and not loop.first %}
        {{ raise_exception('the system message must come first') }}
    {% endif %}
<{{ message.role }}>{{ message.content | trim }}</{{ message.role }}>
{% endfor %}
{% if add_generation_prompt %}
<assistant>
{%- endif %}
"""


def render(source: str, *messages: dict[str, str]) -> str:
    return ChatTemplate(source, SPECIAL_TOKENS).render(messages or (USER,))


def test_conversation() -> None:
    template = ChatTemplate(TEMPLATE, SPECIAL_TOKENS)
    messages = [{"role": "system", "content": " be brief "}, USER]
    expected = "<s><system>be brief</system>\n<user>hi</user>\n"
    assert template.render(messages, add_generation_prompt=False) == expected
    assert template.render(messages) == expected + "<assistant>"


def test_what_the_template_refuses_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="the system message must come first"):
        render(TEMPLATE, USER, {"role": "system", "content": "x"})


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        # Jinja's own tojson would write "<" and "é" as \\u escapes.
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "hi!"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ tools is none }}{{ documents is none }}", "TrueTrue"),
        ("{{ messages[0].name }}", "Ann"),
    ],
)
def test_what_templates_expect(source: str, expected: str) -> None:
    assert render(source, {**USER, "name": "Ann"}) == expected


def test_today_s_date() -> None:
    before = datetime.date.today()
    text = render("{{ strftime_now('%Y-%m-%d') }}")
    assert before.isoformat() <= text <= datetime.date.today().isoformat()


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{% for i in range(10**9) %}{% endfor %}",
    ],
)
def test_template_stays_in_its_sandbox(source: str) -> None:
    with pytest.raises(ValueError, match="chat template failed"):
        render(source)


def test_template_that_fails_otherwise_is_a_value_error() -> None:
    for source in ("{{ 1 / 0 }}", "{{ messages[0].content + 1 }}", "{{ a.b }}"):
        with pytest.raises(ValueError, match="chat template failed"):
            render(source)


def test_template_that_is_not_jinja() -> None:
    template = ChatTemplate("a\n{% if %}", {})  # no error yet: prompts may be used without it
    with pytest.raises(ValueError, match=r"not valid Jinja: .*\(line 2\)"):
        template.render([USER])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], r"messages is \[\]; it must be a list of one or more"),
        ("hi", "messages is 'hi'; it must be a list"),
        (USER, "messages is {.*; it must be a list"),
        (None, "messages is None; it must be a list"),
        ([USER, "hi"], r"messages\[1\] is 'hi'; it must be a mapping"),
        ([{"content": "hi"}], r"messages\[0\]\['role'\] is None; it must be a string"),
        ([{"role": "user"}], r"messages\[0\]\['content'\] is None; it must be a string"),
        ([{"role": "user", "content": [{}] * 99}], r"'content'\] is \[{}.*\.\.\.; it must"),
    ],
)
def test_messages_of_another_form(messages: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChatTemplate("x", {}).render(messages)
