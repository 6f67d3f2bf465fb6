"""Q4_K and Q6_K blocks from float rows: the gguf package can only read these types.

The scales are the plainest choice, not llama.cpp's search; the layout is llama.cpp's.
"""

import numpy as np

BLOCK = 256


def quantize_q4_k(weight: np.ndarray) -> np.ndarray:
    """[N, K] float32 -> [N, K / 256 * 144] uint8."""
    return np.stack([np.concatenate([_q4_k_block(b) for b in row]) for row in _blocks(weight)])


def quantize_q6_k(weight: np.ndarray) -> np.ndarray:
    """[N, K] float32 -> [N, K / 256 * 210] uint8."""
    return np.stack([np.concatenate([_q6_k_block(b) for b in row]) for row in _blocks(weight)])


def _blocks(weight: np.ndarray) -> np.ndarray:
    return weight.reshape(len(weight), -1, BLOCK)


def _q4_k_block(x: np.ndarray) -> np.ndarray:
    groups = x.reshape(8, 32)
    minima = -np.minimum(groups.min(axis=1), 0.0)
    scales = (groups.max(axis=1) + minima) / 15
    d, dmin = np.float16(scales.max() / 63), np.float16(minima.max() / 63)
    six_scales = _round(scales / np.float32(d), 0, 63)
    six_minima = _round(minima / np.float32(dmin), 0, 63)
    step = np.maximum(np.float32(d) * six_scales, 1e-12)[:, None]
    q = _round((groups + (np.float32(dmin) * six_minima)[:, None]) / step, 0, 15)

    packed = np.zeros(12, dtype=np.uint8)
    for i in range(4):
        packed[i] = six_scales[i] | six_scales[i + 4] >> 4 << 6
        packed[i + 4] = six_minima[i] | six_minima[i + 4] >> 4 << 6
        packed[i + 8] = six_scales[i + 4] & 15 | (six_minima[i + 4] & 15) << 4
    pairs = [q[i] | q[i + 1] << 4 for i in range(0, 8, 2)]
    return np.concatenate([_bytes(d), _bytes(dmin), packed, np.concatenate(pairs)])


def _q6_k_block(x: np.ndarray) -> np.ndarray:
    groups = x.reshape(16, 16)
    scales = np.abs(groups).max(axis=1) / 31
    d = np.float16(scales.max() / 127)
    eight_scales = _round(scales / np.float32(d), 1, 127).astype(np.int8)
    # Every other scale is negative, which is legal and must be read as such.
    eight_scales[1::2] *= -1
    step = (np.float32(d) * eight_scales)[:, None]
    q = _round(groups / step + 32, 0, 63).reshape(2, 4, 32)

    low, high = [], []
    for a, b, c, e in q:
        low += [a & 15 | (c & 15) << 4, b & 15 | (e & 15) << 4]
        high += [a >> 4 | b >> 4 << 2 | c >> 4 << 4 | e >> 4 << 6]
    return np.concatenate([*low, *high, eight_scales.view(np.uint8), _bytes(d)])


def _round(x: np.ndarray, low: int, high: int) -> np.ndarray:
    return np.clip(np.rint(x), low, high).astype(np.uint8)


def _bytes(scale: np.float16) -> np.ndarray:
    return np.array([scale]).view(np.uint8)
