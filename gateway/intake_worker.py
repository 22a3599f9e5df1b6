"""One upload's validation, in a process of its own: ``python -m stencilpress.gateway.intake_worker``.

It reads one line with an :class:`IntakeRequest` from standard input, writes one reply to standard output, and
ends. Standard input stays open meanwhile: when it closes, the gateway is gone, and this process goes too.
All that it reads from the upload is hostile, hence the limits on its memory and time.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import select
import stat
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from stencilpress.engine import lifeline
from stencilpress.engine.image import (
    AdapterError,
    Finding,
    ImageHeader,
    Module,
    PeftConfig,
    image_name,
    is_finite,
    not_finite,
    remove_outdated,
    resolve,
    write_image,
)
from stencilpress.engine.spec import ModelSpec, base_ids, load_spec
from stencilpress.gateway import strict_json
from stencilpress.gateway.adapter_config import CONFIG_NAME, MAX_CONFIG_BYTES, check_base, read_config
from stencilpress.gateway.intake_records import (
    LIFELINE_VARIABLE,
    Accepted,
    IntakeLimits,
    IntakeRequest,
    Rejected,
    Reply,
    StorageFull,
    out_of_resources,
)
from stencilpress.gateway.safetensors_file import WEIGHTS_NAME, SafetensorsFile, open_safetensors

MAX_FINDINGS = 100


def main() -> None:
    request = msgspec.json.decode(_read_line(sys.stdin.fileno()), type=IntakeRequest)
    _end_with_gateway(sys.stdin.fileno())
    if inherited := os.environ.get(LIFELINE_VARIABLE):
        lifeline.hold(int(inherited))
    _confine(request)
    sys.stdout.buffer.write(msgspec.json.encode(_reply(request)))


def _read_line(fd: int) -> bytes:
    """Unbuffered: what is left on the descriptor is its end alone."""
    line = b""
    while not line.endswith(b"\n"):
        chunk = os.read(fd, 1 << 16)
        if not chunk:
            raise EOFError("standard input ended within the request")
        line += chunk
    return line


def _end_with_gateway(fd: int) -> None:
    """Die by SIGIO when the other end closes.

    A thread that waits for it, as in ``lifeline``, would not get its turn while a regular expression runs.
    """
    fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([fd], [], [], 0)[0]:  # it closed before
        raise EOFError("the gateway is gone")


def _confine(request: IntakeRequest) -> None:
    """What a hostile file may use up; passing the CPU limit ends the process."""
    for kind, limit in (
        (resource.RLIMIT_AS, request.memory_limit_bytes),
        (resource.RLIMIT_CPU, request.cpu_limit_s),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (soft, hard))


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
    config, asserted, findings = _inspect_config(folder, base_ids(Path(request.model_dir)), request.assert_base)
    try:
        with _open(folder / WEIGHTS_NAME, limits.max_bytes) as file:
            weights = open_safetensors(file, limits.max_tensors)
            modules, problems = resolve(spec, config, weights.shapes) if config else ((), [])
            findings += problems + _over_limits(modules, limits)
            if findings or config is None:
                return _rejected(findings + _not_finite(weights, modules))
            header = _write_image(folder, spec, modules, weights)
    except AdapterError as error:
        return _rejected([*findings, *error.findings])
    return _accepted(spec, folder, modules, header, asserted)


def _inspect_config(
    folder: Path, ids: Sequence[str], assert_base: bool
) -> tuple[PeftConfig | None, bool, list[Finding]]:
    """The config unless it is unusable, whether its base is only asserted, and all findings."""
    try:
        with _open(folder / CONFIG_NAME, MAX_CONFIG_BYTES) as file:
            raw = strict_json.parse(file.read(), CONFIG_NAME)
    except AdapterError as error:
        return None, False, list(error.findings)
    config, findings = read_config(raw)
    base_findings, asserted = check_base(raw, ids, assert_base=assert_base)
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


def _not_finite(weights: SafetensorsFile, modules: Iterable[Module]) -> list[Finding]:
    """The values of a file that is refused anyway, so that its owner hears of all faults at once."""
    names = [name for module in modules for name in (module.a, module.b)]
    return [not_finite(name) for name in names if not is_finite(weights.load(name))]


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


def _rejected(findings: list[Finding]) -> Rejected:
    if len(findings) > MAX_FINDINGS:
        rest = Finding("", "more", f"{len(findings) - MAX_FINDINGS} more findings are not listed")
        findings = [*findings[:MAX_FINDINGS], rest]
    return Rejected(tuple(findings))


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
        size_bytes=sum((folder / name).stat().st_size for name in (CONFIG_NAME, WEIGHTS_NAME)),
        image=image_name(header.fingerprint),
        image_bytes=header.payload_offset + header.payload_bytes,
    )


if __name__ == "__main__":
    main()
