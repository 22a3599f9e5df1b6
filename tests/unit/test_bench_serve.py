"""What the serve bench judges by: tolerances, figures of a load, what its clients make of an answer, its references."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer

pytest.importorskip("peft")

from bench import serve
from bench.serve_checks import (
    Checks,
    Errors,
    first_tokens_hold,
    judge_greedy,
    load_figures,
    version_holds,
    whole,
)
from bench.serve_client import Job, Request, Stream, run_job
from bench.serve_models import SMALL, Models, Reference

THEIRS = [0.1, -0.1] * 10


def model(error: float, *more: float) -> Errors:
    """Twenty values of the server with this RMS error but for those in ``more``; transformers' are off by 0.1."""
    return Errors([*more, *([error, -error] * 10)[len(more) :]], THEIRS)


def test_first_tokens_may_be_off_by_half_as_much_again_as_transformers_over_all_models() -> None:
    assert first_tokens_hold([model(0.1), model(0.1)])
    assert first_tokens_hold([model(0.159), model(0.159)])
    assert not first_tokens_hold([model(0.161), model(0.161)])


def test_one_model_may_be_off_by_more_and_one_value_by_more_again_but_not_without_end() -> None:
    good = [model(0.05)] * 8
    assert first_tokens_hold([*good, model(0.25)])
    assert not first_tokens_hold([*good, model(0.27)])
    assert first_tokens_hold([*good, model(0.1, 0.84)])
    assert not first_tokens_hold([*good, model(0.1, -0.86)])


def test_an_error_that_is_no_number_never_holds() -> None:
    assert not first_tokens_hold([model(0.1), model(0.1, float("nan"))])
    assert not version_holds(Errors([float("nan")], [0.1]))


def test_a_version_is_itself_where_its_largest_error_is_near_that_of_transformers() -> None:
    assert version_holds(Errors([-0.34, 0.0], [0.1, 0.02]))
    assert not version_holds(Errors([-0.36, 0.0], [0.1, 0.02]))


def test_errors_are_of_log_probabilities_of_the_servers_own_tokens() -> None:
    exact, half = torch.tensor([2.0, 1.0, 0.0]), torch.tensor([2.0, 1.5, 0.0])
    log_probabilities = exact.log_softmax(-1)
    errors = Errors.of({1: float(log_probabilities[1]) + 0.25}, exact, half)
    assert errors.ours == pytest.approx([0.25])
    assert errors.theirs == pytest.approx([float(half.log_softmax(-1)[1] - log_probabilities[1])])


def test_a_clear_place_wants_the_best_token_and_another_one_a_near_one() -> None:
    exact = torch.tensor([[9.0, 0.0, 0.0], [9.0, 0.0, 0.0], [5.0, 4.9, 0.0], [5.0, 4.9, 0.0]])
    half = exact + 0.1 * torch.tensor([1.0, -1.0, 1.0])  # places are clear from 0.6 on
    counts = judge_greedy([0, 1, 1, 2], exact, half)
    assert counts == {"clear": 2, "wrong": 1, "unclear": 2, "far": 1}


def test_a_reference_that_is_no_number_is_not_near() -> None:
    exact = torch.full((1, 3), float("nan"))
    assert judge_greedy([0], exact, exact)["far"] == 1


def stream(first_s: float, gaps_s: list[float], **changes: Any) -> Stream:
    times = [10.0 + first_s]
    for gap in gaps_s:
        times.append(times[-1] + gap)
    ended = times[-1]
    options: dict[str, Any] = {"end": "done", "finish": "length", "tokens": len(times), **changes}
    return Stream("a00", sent_s=10.0, ended_s=ended, times_s=times, **options)


def test_a_loads_figures_count_from_the_first_request_to_the_last_end() -> None:
    streams = [stream(0.001 * n, [0.01] * 9) for n in range(1, 101)]
    streams[7].times_s[-1] += 1.0  # one gap of 900
    figures = load_figures(streams)
    assert figures["out_tok_s"] == pytest.approx(1000 / 0.19)
    assert figures["ttft_p50_ms"] == pytest.approx(50.5)
    assert figures["ttft_p99_ms"] == pytest.approx(99.01)
    assert figures["itl_p99_ms"] == pytest.approx(10.0)


@pytest.mark.parametrize("changes", [{"end": "failed"}, {"tokens": 2}, {"finish": "stop"}])
def test_a_load_is_whole_only_if_every_stream_is(changes: dict[str, Any]) -> None:
    good = stream(0.1, [0.1, 0.1])
    assert whole([good, good], 3)
    assert not whole([good, stream(0.1, [0.1, 0.1], **changes)], 3)


async def _answer(request: web.Request) -> web.StreamResponse:
    """What the gateway sends, by the name of the model: whole, an error event, no end, or a refusal."""
    asked = await request.json()
    assert asked["ignore_eos"]
    if asked["model"] == "refused":
        return web.json_response({"error": {"message": "no"}}, status=429)
    response = web.StreamResponse()
    await response.prepare(request)
    chunks: list[dict[str, Any]] = [{"model": "a00@1", "choices": [{"delta": {"content": "x"}}]}] * 2
    if asked["model"] == "failed":
        chunks.append({"error": {"message": "the server stops"}})
    else:
        chunks.append({"model": "a00@1", "choices": [{"delta": {}, "finish_reason": "length"}]})
        chunks.append({"model": "a00@1", "choices": [], "usage": {"completion_tokens": 2}})
    for chunk in chunks:
        await response.write(b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n")
    if asked["model"] == "whole":
        await response.write(b"data: [DONE]\n\n")
    return response


async def test_a_client_tells_a_whole_answer_from_one_that_failed_was_refused_or_broke_off() -> None:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", _answer)
    names = ["whole", "failed", "refused", "broken"]
    async with TestServer(app) as server:
        url = str(server.make_url("")).rstrip("/")
        requests = [Request(name, "sk-none", "text", 2) for name in names]
        seen = await run_job(Job(url, requests, time.monotonic()))
    done, failed, refused, broken = seen
    assert [one.end for one in seen] == ["done", "failed", "refused", "broken"]
    assert (done.tokens, done.finish, done.served, len(done.times_s), done.error) == (2, "length", "a00@1", 2, "")
    assert "the server stops" in failed.error
    assert refused.error.startswith("429")
    assert broken.error
    assert done.sent_s <= done.times_s[0] <= done.ended_s
    assert whole([done], 2)
    assert not any(whole([one], 2) for one in (failed, refused, broken))


@pytest.mark.filterwarnings("ignore")  # transformers and PEFT warn of each other's deprecations
def test_references_put_an_adapter_on_and_take_it_off(tmp_path: Path) -> None:
    models = Models.made(tmp_path, SMALL, 2, "cpu")
    reference, ids = Reference(models.model), [[5, 6, 7], [8, 9]]
    plain = reference.logits(None, ids)
    first, second = (reference.logits(folder, ids) for folder in models.adapters.values())
    again = reference.logits(None, ids)
    assert [exact.shape[0] for exact, _ in plain] == [3, 2]
    for n in range(len(ids)):
        assert torch.equal(plain[n][0], again[n][0])
        assert torch.equal(plain[n][1], again[n][1])
        for (exact, half), (base, _) in ((first[n], plain[n]), (second[n], first[n])):
            lost = (half - exact).abs().max()
            assert 0 < lost < 0.2
            assert (exact - base).abs().max() > 5 * lost


def test_a_check_that_fails_ends_the_bench_with_status_1_and_records_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded: list[Any] = []
    holds = {"greedy": True, "SIGTERM": True}

    def measured(_options: Any, _folder: Path, checks: Checks) -> list[Any]:
        for name, good in holds.items():
            checks.note(name, good, "as told")
        return []

    monkeypatch.setattr(serve, "_measure", measured)
    monkeypatch.setattr(serve, "record", lambda *given: recorded.append(given))
    assert serve.main(["--record"]) == 0
    assert len(recorded) == 1
    holds["SIGTERM"] = False
    assert serve.main(["--record"]) == 1
    assert len(recorded) == 1
    out, err = capsys.readouterr()
    assert "FAIL SIGTERM: as told" in out
    assert err == "failed: SIGTERM\n"


def test_two_engines_on_one_gpu_share_its_memory_and_a_rehearsal_is_not_recorded() -> None:
    options = serve._options
    assert options(["--device", "cuda", "--devices", "0,0"]).pool_gib == serve.SHARED_POOL_GIB
    assert options(["--device", "cuda", "--devices", "0,1"]).pool_gib is None
    assert options(["--device", "cpu", "--devices", "0,0"]).pool_gib is None
    with pytest.raises(SystemExit):
        options(["--small", "--record"])
