"""Intake: what PEFT writes is accepted, all else is refused with the field's name and the reason."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import peft
import pytest
import safetensors.numpy
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from stencilpress.engine.image import Tensor, read_image
from stencilpress.engine.image_format import image_name
from stencilpress.engine.spec import load_spec
from stencilpress.gateway.adapter_config import CONFIG_NAME, MAX_CONFIG_BYTES
from stencilpress.gateway.intake import Accepted, IntakeLimits, Rejected, validate_upload
from stencilpress.gateway.intake_records import MatchedProjection
from stencilpress.gateway.intake_worker import MAX_FINDINGS
from stencilpress.gateway.safetensors_file import WEIGHTS_NAME
from tests.unit.adapters import BASE_ID, FIRST_A, FIRST_B, GOOD, PREFIX, Desk, lora_tensors, safetensors_bytes


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


# --- what is accepted ----------------------------------------------------------------------------------------


async def test_a_sound_adapter_is_accepted_with_its_facts(desk: Desk) -> None:
    verdict = await validate_upload(desk.folder, desk.model_dir)
    image = desk.folder / image_name(load_spec(desk.model_dir).fingerprint())
    assert isinstance(verdict, Accepted)
    assert verdict == Accepted(
        digest=verdict.digest,
        base_id=BASE_ID,
        base_asserted=False,
        ranks=(4,),
        scales=(2.0, 2.0),
        target_modules=("q_proj", "v_proj"),
        num_layers=2,
        size_bytes=sum((desk.folder / name).stat().st_size for name in (CONFIG_NAME, WEIGHTS_NAME)),
        modules=(MatchedProjection("q_proj", 2, (4,), (2.0,)), MatchedProjection("v_proj", 2, (4,), (2.0,))),
        image=image.name,
        image_bytes=image.stat().st_size,
    )
    assert read_image(image, digest=verdict.digest, fingerprint=desk.spec.fingerprint()).header.max_rank == 4
    assert {path.name for path in desk.folder.iterdir()} == {CONFIG_NAME, WEIGHTS_NAME, image.name}


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("init", [True, "gaussian", "orthogonal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_peft_saves_is_accepted(desk: Desk, dtype: torch.dtype, init: bool | str) -> None:
    """The config that PEFT writes has dozens of fields, those of features that are off among them."""
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    model = LlamaForCausalLM(config).to(dtype)
    lora = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=init)
    adapted = peft.get_peft_model(model, lora, autocast_adapter_dtype=False)
    adapted.save_pretrained(desk.folder)
    verdict = desk.inspect(assert_base=True)
    assert isinstance(verdict, Accepted), verdict
    assert len(verdict.target_modules) == 7


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name.removeprefix("base_model.model."),
        lambda name: name.removeprefix("base_model.model.model."),
        lambda name: f"base_model.model.{name.removeprefix('base_model.')}",
        lambda name: name.replace(".weight", ".default.weight"),
        lambda name: name.replace("model.layers", "model.language_model.layers"),
    ],
)
def test_variants_of_names_mean_the_same_adapter(desk: Desk, rename: Callable[[str], str]) -> None:
    plain = desk.inspect()
    desk.weights({rename(name): tensor for name, tensor in lora_tensors(desk.spec).items()})
    renamed = desk.inspect()
    assert isinstance(plain, Accepted)
    assert isinstance(renamed, Accepted)
    assert renamed.digest == plain.digest


def test_metadata_and_order_do_not_change_the_digest(desk: Desk) -> None:
    plain = desk.inspect()
    tensors = dict(reversed(lora_tensors(desk.spec).items()))
    desk.weights(safetensors_bytes(tensors, metadata={"format": "pt"}))
    assert isinstance(plain, Accepted)
    assert desk.inspect() == msgspec.structs.replace(plain, size_bytes=desk_size(desk))


def desk_size(desk: Desk) -> int:
    return sum((desk.folder / name).stat().st_size for name in (CONFIG_NAME, WEIGHTS_NAME))


def test_our_reader_and_safetensors_agree(desk: Desk, tmp_path: Path) -> None:
    """A file by the library, read by us; a file by us, read by the library."""
    ours = desk.inspect()
    tensors = safetensors.numpy.load_file(desk.folder / WEIGHTS_NAME)
    safetensors.numpy.save_file(tensors, desk.folder / WEIGHTS_NAME)
    theirs = desk.inspect()
    assert isinstance(ours, Accepted)
    assert isinstance(theirs, Accepted)
    assert ours.digest == theirs.digest


def test_a_negative_alpha_subtracts_as_in_peft(desk: Desk) -> None:
    desk.config(lora_alpha=-8)
    verdict = desk.inspect()
    assert isinstance(verdict, Accepted)
    assert verdict.scales == (-2.0, -2.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"lora_dropout": 0.1, "task_type": "CAUSAL_LM", "inference_mode": True, "peft_version": "0.21.0"},
        {"auto_mapping": {"base_model_class": "LlamaForCausalLM", "parent_library": "os"}},
        {"a_future_feature": None, "another": False, "a_third": {}},
        {"modules_to_save": [], "use_dora": False, "bias": "none", "layer_replication": None},
        {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}},
        {"rank_pattern": None, "alpha_pattern": {}, "layers_pattern": []},
    ],
)
def test_fields_without_effect_are_passed_over(desk: Desk, changes: dict[str, Any]) -> None:
    desk.config(**changes)
    assert isinstance(desk.inspect(), Accepted)


# --- configs that are refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("peft_type", "IA3", "unsupported"),
        ("peft_type", None, "unsupported"),
        ("use_dora", True, "unsupported"),
        ("bias", "all", "unsupported"),
        ("bias", "lora_only", "unsupported"),
        ("modules_to_save", ["lm_head"], "unsupported"),
        ("auto_map", {"AutoModel": "evil.Model"}, "unsupported"),
        ("trainable_token_indices", [1, 2], "unsupported"),
        ("lora_bias", True, "unsupported"),
        ("layer_replication", [[0, 1], [0, 2]], "unsupported"),
        ("megatron_config", {"a": 1}, "unsupported"),
        ("target_parameters", ["experts.gate_up_proj"], "unsupported"),
        ("alora_invocation_tokens", [5], "unsupported"),
        ("use_qalora", True, "unsupported"),
        ("use_bdlora", {"match_strict": True}, "unsupported"),
        ("arrow_config", {"top_k": 3}, "unsupported"),
        ("kasa_config", {"beta": 1.0}, "unsupported"),
        ("a_future_feature", {"on": 1}, "unsupported"),
        ("init_lora_weights", "pissa", "unsupported"),
        ("init_lora_weights", "pissa_niter_16", "unsupported"),
        ("init_lora_weights", "olora", "unsupported"),
        ("init_lora_weights", "loftq", "unsupported"),
        ("init_lora_weights", "corda", "unsupported"),
        ("r", 0, "bad_value"),
        ("r", -4, "bad_value"),
        ("r", 4.0, "bad_value"),
        ("r", True, "bad_value"),
        ("r", "4", "bad_value"),
        ("lora_alpha", 0, "bad_value"),
        ("lora_alpha", "8", "bad_value"),
        ("lora_alpha", 10**400, "bad_value"),
        ("use_rslora", "yes", "bad_value"),
        ("target_modules", [], "bad_value"),
        ("target_modules", [1], "bad_value"),
        ("target_modules", None, "bad_value"),
        ("target_modules", "(", "bad_pattern"),
        ("target_modules", ["q_proj", "v_proj", "lm_head"], "unsupported_vocabulary"),
        ("target_modules", ["q_proj", "v_proj", "embed_tokens"], "unsupported_vocabulary"),
        ("target_modules", ["q_proj", "v_proj", "o_proj"], "missing_module"),
        ("target_modules", ["q_proj"], "untargeted_module"),
        ("layers_to_transform", -1, "bad_value"),
        ("layers_pattern", "layers", "conflict"),
        ("rank_pattern", {"q_proj": 0}, "bad_value"),
        ("rank_pattern", {"q_proj": "4"}, "bad_value"),
        ("rank_pattern", ["q_proj"], "bad_value"),
        ("rank_pattern", {"(q": 4}, "bad_pattern"),
        ("rank_pattern", {"(a{9999999999}": 4}, "bad_pattern"),
        ("alpha_pattern", {"q_proj": 0}, "bad_value"),
        ("exclude_modules", 5, "bad_value"),
    ],
)
def test_a_config_is_refused_by_the_name_of_the_field(desk: Desk, field: str, value: Any, code: str) -> None:
    desk.config(**{field: value})
    finding = desk.only()
    assert (finding.field, finding.code) == (field, code), finding


def test_tensors_outside_layers_to_transform_are_refused(desk: Desk) -> None:
    desk.config(layers_to_transform=[0])
    finding = desk.only()
    assert (finding.field, finding.code) == ("target_modules", "untargeted_module")
    assert "layers.1" in finding.message


@pytest.mark.parametrize("field", ["r", "lora_alpha", "target_modules"])
def test_a_missing_field_is_not_guessed(desk: Desk, field: str) -> None:
    (desk.folder / CONFIG_NAME).write_text(json.dumps({name: value for name, value in GOOD.items() if name != field}))
    assert (desk.only().field, desk.only().code) == (field, "missing")


def test_a_rank_pattern_that_lies_is_refused_with_both_ranks(desk: Desk) -> None:
    """The config says 8, the pattern says 2, the tensors have 4: the tensors are the truth."""
    desk.config(rank_pattern={"layers.0.self_attn.q_proj": 2})
    finding = desk.only()
    assert (finding.field, finding.code) == (FIRST_A, "rank_conflict")
    assert "rank 4" in finding.message
    assert "rank 2" in finding.message


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "bad_json"),
        (b"{", "bad_json"),
        (b"[]", "bad_json"),
        (b'"text"', "bad_json"),
        (b"\xff\xfe{\x00}\x00", "bad_json"),
        (b"[" * 100_000, "bad_json"),
        (b'{"r": NaN}', "bad_json"),
        (b'{"r": -Infinity}', "bad_json"),
        (b'{"r": ' + b"9" * 5000 + b"}", "bad_json"),
        (b'{"r": 4, "r": 8}', "duplicate_key"),
        (b'{"rank_pattern": {"q_proj": 1, "q_proj": 2}}', "duplicate_key"),
        (b" " * (MAX_CONFIG_BYTES + 1), "too_large"),
    ],
)
def test_a_config_that_is_no_strict_json_is_refused(desk: Desk, content: bytes, code: str) -> None:
    (desk.folder / CONFIG_NAME).write_bytes(content)
    assert (desk.only().field, desk.only().code) == (CONFIG_NAME, code)


# --- the base ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [BASE_ID, "tiny"])
def test_the_base_or_an_alias_must_be_named(desk: Desk, name: str) -> None:
    desk.config(base_model_name_or_path=name)
    verdict = desk.inspect(assert_base=True)
    assert isinstance(verdict, Accepted)
    assert not verdict.base_asserted, "a named base needs nobody's word"


@pytest.mark.parametrize("name", [None, "", "/home/me/llama", "./llama", "../llama", "~/llama", "C:\\llama", "a/b/c"])
def test_without_a_name_the_uploader_must_assert_the_base(desk: Desk, name: str | None) -> None:
    desk.config(base_model_name_or_path=name)
    assert (desk.only().field, desk.only().code) == ("base_model_name_or_path", "unknown_base")
    verdict = desk.inspect(assert_base=True)
    assert isinstance(verdict, Accepted)
    assert verdict.base_asserted


@pytest.mark.parametrize("assert_base", [False, True])
@pytest.mark.parametrize("name", ["acme/other-llama", "ACME/tiny-llama", 5, ["acme/tiny-llama"]])
def test_another_base_of_the_same_shapes_is_refused(desk: Desk, name: Any, assert_base: bool) -> None:
    desk.config(base_model_name_or_path=name)
    finding = desk.only(assert_base=assert_base)
    assert (finding.field, finding.code) == ("base_model_name_or_path", "wrong_base")
    assert BASE_ID in finding.message
    assert str(name) in finding.message


# --- tensors that do not fit ---------------------------------------------------------------------------------


Change = Callable[[dict[str, Tensor]], None]


def put(name: str, shape: tuple[int, ...] = (4, 32)) -> Change:
    return lambda tensors: tensors.update({name: np.ones(shape, np.float32)})


def drop(name: str) -> Change:
    return lambda tensors: tensors.__delitem__(name)


def poison(value: float) -> Change:
    return lambda tensors: tensors[FIRST_B].__setitem__((7, 1), value)


def stray(name: str, code: str, word: str = "") -> Any:
    """A tensor that stands nowhere in this base, beside an adapter that is sound without it."""
    return pytest.param(put(name), name, code, (word,), id=name)


def variant(old: str, new: str, code: str, word: str = "") -> Any:
    return stray(FIRST_A.replace(old, new), code, word)


@pytest.mark.parametrize(
    ("change", "field", "code", "words"),
    [
        (drop(FIRST_B), FIRST_A, "missing_tensor", ("lora_B",)),
        (drop(FIRST_A), FIRST_B, "missing_tensor", ("lora_A",)),
        (put(FIRST_A, (4, 64)), FIRST_A, "wrong_shape", ("(4, 64)", "(r, 32)")),
        (put(FIRST_A, (4, 32, 1)), FIRST_A, "wrong_shape", ("(4, 32, 1)",)),
        (put(FIRST_A, (32,)), FIRST_A, "wrong_shape", ("(32,)",)),
        (put(FIRST_B, (48, 4)), FIRST_B, "wrong_shape", ("(48, 4)", "(32, r)")),
        (put(FIRST_B, (4, 32)), FIRST_B, "wrong_shape", ("(4, 32)", "(32, r)")),
        (put(FIRST_A, (8, 32)), FIRST_B, "rank_mismatch", ("(32, 4)", "(8, 32)")),
        (poison(np.nan), FIRST_B, "not_finite", ()),
        (poison(-np.inf), FIRST_B, "not_finite", ()),
        (poison(3.4e38), FIRST_B, "overflow", ("bfloat16",)),
        stray("x", "unknown_tensor"),
        stray(f"module.{FIRST_A}", "unknown_tensor"),
        stray(f"{PREFIX}lm_head.lora_A.weight", "unsupported_vocabulary"),
        stray(f"{PREFIX}lm_head.weight", "unsupported_vocabulary"),
        stray(f"{PREFIX}model.embed_tokens.lora_embedding_A", "unsupported_vocabulary"),
        stray(f"{PREFIX}score.modules_to_save.weight", "unsupported_tensor"),
        variant("self_attn", "cross_attn", "unknown_tensor"),
        variant("layers.0", "layers.00", "unknown_tensor"),
        variant("layers.0", "layers.2", "unknown_layer", "2 layers"),
        variant("base_model.", "", "duplicate_tensor", FIRST_A),
        variant("lora_A.weight", "lora_magnitude_vector", "unsupported_tensor", "DoRA"),
        variant("lora_A.weight", "lora_B.bias", "unsupported_tensor", "bias"),
        variant("q_proj", "qkv_proj", "fused_projection", "k_proj"),
    ],
)
def test_a_tensor_is_refused_by_its_name(
    desk: Desk, change: Change, field: str, code: str, words: tuple[str, ...]
) -> None:
    tensors = lora_tensors(desk.spec)
    change(tensors)
    desk.weights(tensors)
    finding = desk.only()
    assert (finding.field, finding.code) == (field, code), finding
    for word in words:
        assert word in finding.message


def test_nan_in_half_precision_files_is_found(desk: Desk) -> None:
    for bits in (0x7FC0, 0xFF80, 0x7F80):
        tensors = {name: (t.view(np.uint32) >> 16).astype(np.uint16) for name, t in lora_tensors(desk.spec).items()}
        tensors[FIRST_A][3, 31] = bits
        desk.weights(tensors)
        assert (desk.only().field, desk.only().code) == (FIRST_A, "not_finite")
    half = lora_tensors(desk.spec, dtype=np.float16)
    half[FIRST_A][0, 0] = np.nan
    desk.weights(half)
    assert (desk.only().field, desk.only().code) == (FIRST_A, "not_finite")


def test_all_faults_are_told_at_once(desk: Desk) -> None:
    """Config, base, names, shapes, values and limits in one answer."""
    tensors = lora_tensors(desk.spec)
    second = FIRST_A.replace("layers.0", "layers.1")
    tensors[second][0, 0] = np.nan
    put("stray")(tensors)
    put(FIRST_A, (4, 64))(tensors)
    desk.weights(tensors)
    desk.config(use_dora=True, modules_to_save=["lm_head"], base_model_name_or_path="acme/other")
    found = {(finding.field, finding.code) for finding in desk.findings(IntakeLimits(max_rank=2))}
    assert found >= {
        ("use_dora", "unsupported"),
        ("modules_to_save", "unsupported"),
        ("base_model_name_or_path", "wrong_base"),
        ("stray", "unknown_tensor"),
        (FIRST_A, "wrong_shape"),
        (second, "rank_over_limit"),
        (second, "not_finite"),
    }


def test_the_list_of_findings_is_bounded(desk: Desk) -> None:
    desk.weights({f"stray.{n}": np.ones(1, np.float32) for n in range(500)})
    findings = desk.findings()
    assert len(findings) == MAX_FINDINGS + 1
    assert findings[-1].code == "more"


# --- limits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "code", "words"),
    [
        (IntakeLimits(max_rank=3), "rank_over_limit", ("rank 4", "limit is 3")),
        (IntakeLimits(max_bytes=1000), "too_large", ("limit is 1000",)),
        (IntakeLimits(max_tensors=7), "too_many_tensors", ("8 tensors", "limit is 7")),
        (IntakeLimits(max_scale=1.5), "scale_over_limit", ("scale 2", "limit is 1.5")),
        (IntakeLimits(target_modules=("v_proj",)), "target_not_allowed", ("q_proj", "v_proj")),
    ],
)
def test_each_limit_is_named_with_the_value_that_passed_it(
    desk: Desk, limits: IntakeLimits, code: str, words: tuple[str, ...]
) -> None:
    found = [finding for finding in desk.findings(limits) if finding.code == code]
    assert found
    for word in words:
        assert word in found[0].message


def test_the_rank_limit_looks_at_tensors_not_at_the_config(desk: Desk) -> None:
    """A config of rank 4 with tensors of rank 256 passes a limit that reads configs."""
    desk.weights(lora_tensors(desk.spec, rank=256))
    codes = {finding.code for finding in desk.findings(IntakeLimits(max_rank=64))}
    assert codes == {"rank_conflict", "rank_over_limit"}


@pytest.mark.parametrize(("alpha", "code"), [(1e-300, "bad_scale"), (1e9, "scale_over_limit")])
def test_a_scale_that_fp32_or_sense_cannot_hold_is_refused(desk: Desk, alpha: float, code: str) -> None:
    desk.config(lora_alpha=alpha)
    assert {finding.code for finding in desk.findings()} == {code}


# --- the folder ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [CONFIG_NAME, WEIGHTS_NAME])
def test_a_missing_file_is_named(desk: Desk, name: str) -> None:
    (desk.folder / name).unlink()
    assert (desk.only().field, desk.only().code) == (name, "missing_file")


@pytest.mark.parametrize("name", [CONFIG_NAME, WEIGHTS_NAME])
def test_links_and_pipes_are_not_followed(desk: Desk, tmp_path: Path, name: str) -> None:
    (desk.folder / name).rename(tmp_path / "elsewhere")
    (desk.folder / name).symlink_to(tmp_path / "elsewhere")
    assert (desk.only().field, desk.only().code) == (name, "not_a_file")
    (desk.folder / name).unlink()
    os.mkfifo(desk.folder / name)
    assert (desk.only().field, desk.only().code) == (name, "not_a_file")


async def test_python_files_beside_an_adapter_are_never_imported(desk: Desk) -> None:
    for module in ("sitecustomize", "numpy", "evil", "stencilpress"):
        (desk.folder / f"{module}.py").write_text(f"open({str(desk.folder / 'ran')!r}, 'w')")
    desk.config(auto_map={"AutoConfig": "evil.Config"})
    verdict = await validate_upload(desk.folder, desk.model_dir)
    assert isinstance(verdict, Rejected)
    assert not (desk.folder / "ran").exists()
