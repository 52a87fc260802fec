"""Finds and loads the compiled kernels, and describes tensors to them in the structs of native/kdn.h."""

import ctypes
import functools
import platform
import re
from pathlib import Path

import torch
from torch import Tensor

import kdn.ops
from kdn.ops.backends.torch.layout import most_chunks

_TYPES = {torch.float32: 0, torch.bfloat16: 1}
_SUFFIX = {"Darwin": ".dylib", "Windows": ".dll"}.get(platform.system(), ".so")


class Rows(ctypes.Structure):
    """KdnRows: a tensor with a time axis, or nothing."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("time", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("type", ctypes.c_int32),
        ("channels", ctypes.c_int32),
    )


class Sequences(ctypes.Structure):
    """KdnSequences."""

    _fields_ = (("offsets", ctypes.c_void_p), ("count", ctypes.c_int64), ("length", ctypes.c_int64))


class Memory(ctypes.Structure):
    """KdnMemory."""

    _fields_ = (
        ("sequences", Sequences),
        ("heads", ctypes.c_int64),
        ("key", ctypes.c_int64),
        ("value", ctypes.c_int64),
        ("q", Rows),
        ("k", Rows),
        ("v", Rows),
        ("gain", Rows),
        ("decay", Rows),
        ("scale", ctypes.c_float),
        ("out", Rows),
        ("initial", ctypes.c_void_p),
        ("state", ctypes.c_void_p),
        ("checkpoints", ctypes.c_void_p),
        ("first_chunk", ctypes.c_void_p),
        ("d_out", Rows),
        ("d_state", ctypes.c_void_p),
        ("d_q", Rows),
        ("d_k", Rows),
        ("d_v", Rows),
        ("d_gain", Rows),
        ("d_decay", Rows),
        ("d_initial", ctypes.c_void_p),
    )


class Gain(ctypes.Structure):
    """KdnGain."""

    _fields_ = (
        ("sequences", Sequences),
        ("heads", ctypes.c_int64),
        ("key", ctypes.c_int64),
        ("k", Rows),
        ("decay", Rows),
        ("noise", Rows),
        ("obs", Rows),
        ("info_scale", ctypes.c_void_p),
        ("gain", Rows),
        ("prior", Rows),
        ("initial", ctypes.c_void_p),
        ("cov", ctypes.c_void_p),
        ("checkpoints", ctypes.c_void_p),
        ("first_chunk", ctypes.c_void_p),
        ("d_gain", Rows),
        ("d_prior", Rows),
        ("d_cov", ctypes.c_void_p),
        ("d_k", Rows),
        ("d_decay", Rows),
        ("d_noise", Rows),
        ("d_obs", Rows),
        ("d_info_scale", ctypes.c_void_p),
        ("d_initial", ctypes.c_void_p),
    )


class Decode(ctypes.Structure):
    """KdnDecode."""

    _fields_ = (
        ("count", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("key", ctypes.c_int64),
        ("value", ctypes.c_int64),
        ("q", Rows),
        ("k", Rows),
        ("v", Rows),
        ("decay", Rows),
        ("kind", ctypes.c_int32),
        ("gain", Rows),
        ("noise", Rows),
        ("obs", Rows),
        ("info_scale", ctypes.c_void_p),
        ("cov", ctypes.c_void_p),
        ("state", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        ("out", Rows),
    )


class Conv(ctypes.Structure):
    """KdnConv."""

    _fields_ = (
        ("sequences", Sequences),
        ("heads", ctypes.c_int64),
        ("key", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("x", Rows),
        ("weight", ctypes.c_void_p),
        ("history", ctypes.c_void_p),
        ("activation", ctypes.c_int32),
        ("unit", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("y", Rows),
        ("d_y", Rows),
        ("d_x", Rows),
        ("d_weight", ctypes.c_void_p),
        ("d_history", ctypes.c_void_p),
    )


class Decay(ctypes.Structure):
    """KdnDecay."""

    _fields_ = (
        ("batch", ctypes.c_int64),
        ("time", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("key", ctypes.c_int64),
        ("f", Rows),
        ("rate", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", Rows),
        ("d_out", Rows),
        ("d_f", Rows),
        ("d_rate", ctypes.c_void_p),
        ("d_bias", ctypes.c_void_p),
    )


class ReadOut(ctypes.Structure):
    """KdnReadOut."""

    _fields_ = (
        ("batch", ctypes.c_int64),
        ("time", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("value", ctypes.c_int64),
        ("x", Rows),
        ("gate", Rows),
        ("weight", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("silu", ctypes.c_int32),
        ("y", Rows),
        ("d_y", Rows),
        ("d_x", Rows),
        ("d_gate", Rows),
        ("d_weight", ctypes.c_void_p),
    )


class SwiGLU(ctypes.Structure):
    """KdnSwiGLU."""

    _fields_ = (
        ("batch", ctypes.c_int64),
        ("time", ctypes.c_int64),
        ("gate", Rows),
        ("up", Rows),
        ("y", Rows),
        ("d_y", Rows),
        ("d_gate", Rows),
        ("d_up", Rows),
    )


class Loss(ctypes.Structure):
    """KdnLoss."""

    _fields_ = (
        ("rows", ctypes.c_int64),
        ("logits", Rows),
        ("labels", ctypes.c_void_p),
        ("loss", ctypes.c_void_p),
        ("gradient", ctypes.c_int32),
    )


def _load() -> ctypes.CDLL | str:
    """The library, or one sentence saying why there is none."""
    # A list: an editable installation may keep the compiled file apart from the sources.
    files = [Path(folder) / "native" / f"libkdn_cpu{_SUFFIX}" for folder in kdn.ops.__path__]
    file = next((f for f in files if f.exists()), None)
    if file is None:
        return (
            "its kernels are not compiled: there was no C++ compiler at installation, or kdn runs from source"
        )
    try:
        library = ctypes.CDLL(str(file))
    except OSError as error:
        return f"its kernels do not load: {error}"
    library.kdn_isa.restype = ctypes.c_char_p
    library.kdn_fma_peak.restype = ctypes.c_double
    library.kdn_chunk.restype = library.kdn_piece.restype = ctypes.c_int64
    pointer, whole = ctypes.c_void_p, ctypes.c_int64
    library.kdn_matrix_vector.argtypes = (
        pointer,
        whole,
        whole,
        whole,
        pointer,
        pointer,
        pointer,
        *[ctypes.c_int] * 2,
    )
    library.kdn_set_threads(_openmp_entry())
    return library


def _openmp_entry() -> ctypes.c_void_p | None:
    """GOMP_parallel of the OpenMP runtime that torch uses, so that its threads and ours are the same."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    loaded = sorted(set(re.findall(r"(/\S*/lib(?:gomp|iomp5|omp)\b\S*\.so\S*)", maps)))
    loaded.sort(key=lambda path: "torch" not in path)
    for path in loaded:
        try:
            return ctypes.cast(ctypes.CDLL(path).GOMP_parallel, ctypes.c_void_p)
        except (OSError, AttributeError):
            continue
    return None


LIBRARY = _load()


def instruction_set() -> str:
    """Which of the compiled variants is in use: avx512, avx2 or baseline."""
    name: bytes = _library().kdn_isa()
    return name.decode()


def use_instruction_set(name: str) -> None:
    """Switch to another compiled variant; for tests and benchmarks."""
    if not _library().kdn_set_isa(name.encode()):
        raise ValueError(f"instruction set must be one this machine has, got {name!r}")


@functools.cache
def fma_peak() -> float:
    """Measured flop/s of one core doing nothing but multiply-adds."""
    peak: float = _library().kdn_fma_peak()
    return peak


def _library() -> ctypes.CDLL:
    if isinstance(LIBRARY, str):
        raise RuntimeError(f"the cpu backend cannot run: {LIBRARY}")
    return LIBRARY


@functools.cache
def chunk() -> int:
    """Tokens between the checkpoints of the backward passes."""
    length: int = _library().kdn_chunk()
    return length


@functools.cache
def piece() -> int:
    """Tokens of a task where no token needs the one before."""
    length: int = _library().kdn_piece()
    return length


def call(name: str, arguments: ctypes.Structure) -> None:
    getattr(_library(), name)(ctypes.byref(arguments), torch.get_num_threads())


def matrix_vector(weight: Tensor, x: Tensor, bias: Tensor | None, y: Tensor) -> None:
    """y = weight x + bias, all of one type that is served; x, bias and y contiguous."""
    rows, n = weight.shape
    at = None if bias is None else bias.data_ptr()
    type_, threads = _TYPES[y.dtype], torch.get_num_threads()
    to = (weight.data_ptr(), weight.stride(0), rows, n, x.data_ptr(), at, y.data_ptr(), type_, threads)
    _library().kdn_matrix_vector(*to)


def served(*tensors: Tensor | None) -> bool:
    """Whether the kernels take these tensors' types."""
    return all(x is None or x.dtype in _TYPES for x in tensors)


class Described:
    """Fills structs from tensors, and keeps those tensors alive that had to be made for it."""

    def __init__(self) -> None:
        self.alive: list[Tensor] = []

    def rows(self, x: Tensor | None) -> Rows:
        """A tensor [B, T, H, X] or [B, T, H]; a gap between channels is closed by a copy."""
        if x is None:
            return Rows()
        x = x if x.ndim >= 4 else x[..., None]
        if x.ndim == 5:
            x = x.flatten(3)
        if x.shape[3] > 1 and x.stride(3) != 1:
            x = x.contiguous()
        self.alive.append(x)
        return Rows(x.data_ptr(), x.stride(0), x.stride(1), x.stride(2), _TYPES[x.dtype], x.shape[3])

    def plain(self, x: Tensor | None, dtype: torch.dtype = torch.float32) -> int | None:
        """A contiguous tensor of one type, as a bare address."""
        if x is None:
            return None
        x = x.to(dtype).contiguous()
        self.alive.append(x)
        return x.data_ptr()

    def sequences(self, x: Tensor, cu_seqlens: Tensor | None) -> Sequences:
        if cu_seqlens is None:
            return Sequences(None, x.shape[0], x.shape[1])
        return Sequences(self.plain(cu_seqlens, torch.int64), cu_seqlens.shape[0] - 1, 0)

    def first_chunks(self, x: Tensor, cu_seqlens: Tensor | None, size: int) -> int | None:
        """Where each sequence's checkpoints begin."""
        if cu_seqlens is None:
            per_sequence = -(-x.shape[1] // size)
            return self.plain(torch.arange(x.shape[0]) * per_sequence, torch.int64)
        chunks = (cu_seqlens.long().diff() + size - 1) // size
        return self.plain(chunks.cumsum(0) - chunks, torch.int64)


def checkpoint_rows(x: Tensor, cu_seqlens: Tensor | None, size: int) -> int:
    return most_chunks(x, cu_seqlens, size)
