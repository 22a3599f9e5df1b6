"""One upload's validation, in a process of its own: ``python -m stencilpress.gateway.intake_worker``.

It reads one line with an :class:`IntakeRequest` from standard input, writes one reply to standard output, and
ends. Standard input stays open meanwhile: when it closes, the gateway is gone, and this process goes too.
All that it reads from the upload is hostile, hence the limits on its memory and time.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from stencilpress.engine.image import (
    AdapterError,
    Finding,
    ImageHeader,
    Module,
    PeftConfig,
    image_name,
    remove_outdated,
    resolve,
    value_problem,
    write_image,
)
from stencilpress.engine.spec import ModelSpec, base_ids, load_spec
from stencilpress.gateway import strict_json
from stencilpress.gateway.adapter_config import CONFIG_NAME, MAX_CONFIG_BYTES, check_base, read_config
from stencilpress.gateway.archive import unpack
from stencilpress.gateway.intake_records import (
    Accepted,
    BaseCheck,
    IntakeLimits,
    IntakeRequest,
    MatchedProjection,
    Rejected,
    Reply,
    StorageFull,
    out_of_resources,
)
from stencilpress.gateway.safetensors_file import WEIGHTS_NAME, SafetensorsFile, open_safetensors
from stencilpress.gateway.worker_process import confine, read_request

MAX_FINDINGS = 100
MAX_SCALES = 16
"""Distinct scales of a projection that are told."""


def main() -> None:
    request = msgspec.json.decode(read_request(), type=IntakeRequest)
    confine(request.memory_limit_bytes, request.cpu_limit_s)
    sys.stdout.buffer.write(msgspec.json.encode(_reply(request)))


def _reply(request: IntakeRequest) -> Reply:
    try:
        return inspect(request)
    except MemoryError:
        return out_of_resources(f"more than {request.memory_limit_bytes >> 20} MiB of memory")
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return StorageFull(error.errno)
        raise


def inspect(request: IntakeRequest) -> Accepted | Rejected:
    """Check an upload, and build its image if nothing is wrong with it."""
    folder, limits = Path(request.folder), request.limits
    spec = load_spec(Path(request.model_dir), request.dtype)
    findings, modules = list[Finding](), tuple[Module, ...]()
    try:
        if request.archive:
            findings = unpack(folder / request.archive, folder, limits.max_bytes + MAX_CONFIG_BYTES)
        config, asserted, more = _inspect_config(folder, base_ids(Path(request.model_dir)), request.base_check)
        findings += more
        with _open(folder / WEIGHTS_NAME, limits.max_bytes) as file:
            weights = open_safetensors(file, limits.max_tensors)
            modules, problems = resolve(spec, config, weights.shapes) if config else ((), [])
            findings += problems + _over_limits(modules, limits)
            if findings or config is None:
                return _rejected(folder, modules, findings + _bad_values(weights, modules, spec))
            header = _write_image(folder, spec, modules, weights)
    except AdapterError as error:
        return _rejected(folder, modules, [*findings, *error.findings])
    return _accepted(spec, folder, modules, header, asserted)


def _inspect_config(
    folder: Path, ids: Sequence[str], base_check: BaseCheck
) -> tuple[PeftConfig | None, bool, list[Finding]]:
    """The config unless it is unusable, whether its base is only asserted, and all findings."""
    try:
        with _open(folder / CONFIG_NAME, MAX_CONFIG_BYTES) as file:
            raw = strict_json.parse(file.read(), CONFIG_NAME)
    except AdapterError as error:
        return None, False, list(error.findings)
    config, findings = read_config(raw)
    if base_check == "known":
        return config, False, findings
    base_findings, asserted = check_base(raw, ids, assert_base=base_check == "asserted")
    return config, asserted, findings + base_findings


def _open(path: Path, max_bytes: int) -> BinaryIO:
    """Open a regular file of the upload; a link or a pipe is refused, not followed."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise AdapterError([Finding(path.name, "missing_file", "was not uploaded")]) from None
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise AdapterError([Finding(path.name, "not_a_file", "is a link")]) from None
    file = os.fdopen(fd, "rb")
    facts = os.fstat(fd)
    problem = None
    if not stat.S_ISREG(facts.st_mode):
        problem = Finding(path.name, "not_a_file", "is not a regular file")
    elif facts.st_size > max_bytes:
        problem = Finding(path.name, "too_large", f"has {facts.st_size} bytes; the limit is {max_bytes}")
    if problem:
        file.close()
        raise AdapterError([problem])
    return file


def _over_limits(modules: Iterable[Module], limits: IntakeLimits) -> list[Finding]:
    """One finding per limit and projection name, however many layers pass it."""
    found: dict[tuple[str, str], Finding] = {}
    for module in modules:
        name = module.name.rpartition(".")[2]
        if module.rank > limits.max_rank:
            text = f"has rank {module.rank}; the limit is {limits.max_rank}"
            found.setdefault((name, "rank"), Finding(module.a, "rank_over_limit", text))
        if abs(module.scale) > limits.max_scale:
            text = f"gives {module.name} the scale {module.scale:g}; the limit is {limits.max_scale:g}"
            found.setdefault((name, "scale"), Finding("lora_alpha", "scale_over_limit", text))
        if limits.target_modules and name not in limits.target_modules:
            text = f"{name} may not be adapted; allowed: {', '.join(limits.target_modules)}"
            found.setdefault((name, "target"), Finding("target_modules", "target_not_allowed", text))
    return list(found.values())


def _bad_values(weights: SafetensorsFile, modules: Iterable[Module], spec: ModelSpec) -> list[Finding]:
    """The values of a file that is refused anyway, so that its owner hears of all faults at once."""
    names = [name for module in modules for name in (module.a, module.b)]
    return [finding for name in names if (finding := value_problem(name, weights.load(name), spec.dtype)) is not None]


def _write_image(folder: Path, spec: ModelSpec, modules: Iterable[Module], weights: SafetensorsFile) -> ImageHeader:
    """Under another name until it is whole: the folder may be a blob that is in use."""
    path = folder / image_name(spec.fingerprint())
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    try:
        header = write_image(partial, spec, modules, weights.load)
        partial.replace(path)
        remove_outdated(folder, header.fingerprint)
    finally:
        partial.unlink(missing_ok=True)
    return header


def _rejected(folder: Path, modules: Iterable[Module], findings: list[Finding]) -> Rejected:
    if len(findings) > MAX_FINDINGS:
        rest = Finding("", "more", f"{len(findings) - MAX_FINDINGS} more findings are not listed")
        findings = [*findings[:MAX_FINDINGS], rest]
    return Rejected(tuple(findings), _matched(modules), _size_bytes(folder))


def _matched(modules: Iterable[Module]) -> tuple[MatchedProjection, ...]:
    """By projection, in the order in which a layer has them."""
    found: dict[str, list[Module]] = {}
    for module in sorted(modules, key=lambda module: module.place[1:]):
        found.setdefault(module.name.rpartition(".")[2], []).append(module)
    return tuple(
        MatchedProjection(
            name,
            len(same),
            tuple(sorted({module.rank for module in same})),
            tuple(sorted({module.scale for module in same}))[:MAX_SCALES],
        )
        for name, same in found.items()
    )


def _size_bytes(folder: Path) -> int:
    """Of the uploaded files; what is missing counts nothing."""
    return sum(path.lstat().st_size for name in (CONFIG_NAME, WEIGHTS_NAME) if (path := folder / name).is_file())


def _accepted(
    spec: ModelSpec, folder: Path, modules: Sequence[Module], header: ImageHeader, asserted: bool
) -> Accepted:
    names = {module.name.rpartition(".")[2] for module in modules}
    scales = [module.scale for module in modules]
    return Accepted(
        digest=header.digest,
        base_id=spec.base_id,
        base_asserted=asserted,
        ranks=tuple(sorted({module.rank for module in modules})),
        scales=(min(scales), max(scales)),
        target_modules=tuple(p.name for group in spec.groups for p in group.projections if p.name in names),
        num_layers=len({module.place.layer for module in modules}),
        size_bytes=_size_bytes(folder),
        modules=_matched(modules),
        image=image_name(header.fingerprint),
        image_bytes=header.payload_offset + header.payload_bytes,
    )


if __name__ == "__main__":
    main()
