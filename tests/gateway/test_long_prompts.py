"""A prompt that one backend finds too long goes to one with a larger window."""

from harness import Line, Received, Scripted, answer_completion, gateway_with, json_response, post

TOO_LONG = {
    "error": {
        "code": 400,
        "message": "request (7515 tokens) exceeds the available context size (2048 tokens)",
        "type": "exceed_context_size_error",
        "n_prompt_tokens": 7515,
        "n_ctx": 2048,
    }
}
TABLE = 'models = ["m"]\nkind = "llama-server"\nraw = true\n'


def too_long(line: Line, request: Received) -> None:
    line.send(json_response(TOO_LONG, 400))


def test_the_exact_length_leads_to_the_larger_window(tmp_path):
    small, large = Scripted(too_long), Scripted()
    config = (
        f'[[backends]]\nid = "small"\nurl = "{small.url}"\nweight = 100\ncontext_length = 2048\n{TABLE}'
        f'[[backends]]\nid = "large"\nurl = "{large.url}"\ncontext_length = 8192\n{TABLE}'
    )
    with gateway_with(tmp_path, config=config) as gateway:
        answer = gateway.ask(post())
        assert answer.status == 200
        assert (len(small.requests), len(large.requests)) == (1, 1)
        assert gateway.is_idle()


def test_where_nobody_takes_it_the_client_gets_the_backends_own_words(tmp_path):
    small, also_small = Scripted(too_long), Scripted(answer_completion)
    config = "".join(
        f'[[backends]]\nid = "{id}"\nurl = "{backend.url}"\nweight = {weight}\ncontext_length = 2048\n{TABLE}'
        for id, backend, weight in (("a", small, 100), ("b", also_small, 1))
    )
    with gateway_with(tmp_path, config=config) as gateway:
        answer = gateway.ask(post())
        assert answer.status == 400
        assert answer.json == TOO_LONG
        assert also_small.requests == []


def test_another_400_is_passed_on_and_tried_nowhere_else(tmp_path):
    def refuses(line: Line, request: Received) -> None:
        line.send(json_response({"error": {"message": "no", "type": "invalid_request_error"}}, 400))

    first, second = Scripted(refuses), Scripted(refuses)
    with gateway_with(tmp_path, first, second, more=TABLE) as gateway:
        answer = gateway.ask(post())
        assert answer.status == 400
        assert len(first.requests) + len(second.requests) == 1
        assert gateway.is_idle()
