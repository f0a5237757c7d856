"""Would a bitshift trellis code rows better than srft3 and srft2 do? Squared error on normal values, heads of 128.

A step of the trellis shifts k bits into a window; the window is the place of a value in a table, which is learned by
Viterbi's algorithm and means in turn. Needs numpy: python3 docs/simulations/trellis.py (half a minute)
"""
import numpy as np

HEAD, GROUP = 128, 32
# codec/srft.rs: levels, and the scales that are tried for either end of the table
LEVELS = {3: [-127, -77, -44, -17, 8, 34, 63, 101], 2: [-127, -44, 18, 88]}
TRIES = {3: ((-2, -1, 0, 1), (-3, -2, -1, 0)), 2: ((-5, -3, -2, -1), (-7, -6, -5, -4))}
CODES = np.arange(1, 128)
SCALES = (1 + (CODES & 7) / 8) * 2.0 ** ((CODES >> 3) - 7) / 128


def srft_error(x, bits):
    """The share of the energy that is lost, before kappa."""
    levels = np.array(LEVELS[bits], float)
    middles = (levels[1:] + levels[:-1]) / 2
    x = x.reshape(-1, GROUP)
    largest = np.where(-x.min(1) > x.max(1), x.min(1), x.max(1))
    gain = np.zeros(len(x))
    for last, tries in enumerate(TRIES[bits]):
        base = np.abs(largest) * 128 / (levels[-1] if last else -levels[0])
        exponent = np.floor(np.log2(base))
        first = ((exponent + 7) * 8 + np.floor((base / 2**exponent - 1) * 8)).astype(int)
        for step in tries:
            scale = SCALES[np.clip(first + step, 1, 127) - 1] * np.where((largest < 0) == bool(last), -1, 1)
            q = levels[np.searchsorted(middles, x / scale[:, None])]
            gain = np.maximum(gain, scale * (2 * (x * q).sum(1) - scale * (q * q).sum(1)))
    return 1 - gain.sum() / (x**2).sum()


def viterbi(x, table, bits, window):
    """The windows of the best path of each row, which begins in state 0."""
    rows, length = x.shape
    states, windows = 1 << (window - bits), np.arange(1 << window)
    by_next = np.argsort(windows & (states - 1), kind="stable").reshape(states, -1)
    cost = np.where(np.arange(states) == 0, 0.0, 1e30) + np.zeros((rows, 1))
    back = np.zeros((length, rows, states), np.int16)
    for t in range(length):
        paths = (cost[:, windows >> bits] + (x[:, t, None] - table) ** 2)[:, by_next]
        best = paths.argmin(2)
        cost = np.take_along_axis(paths, best[:, :, None], 2)[:, :, 0]
        back[t] = by_next[np.arange(states), best]
    state, found = cost.argmin(1), np.zeros((rows, length), np.int16)
    for t in reversed(range(length)):
        found[:, t] = back[t][np.arange(rows), state]
        state = found[:, t] >> bits
    return found


def learned(rng, bits, window):
    table, x = rng.standard_normal(1 << window), rng.standard_normal((200, HEAD))
    for _ in range(12):
        path = viterbi(x, table, bits, window).ravel()
        count = np.bincount(path, minlength=len(table))
        table = np.where(count > 0, np.bincount(path, x.ravel(), len(table)) / np.maximum(count, 1), table)
    return table


def main():
    rng = np.random.default_rng(1)
    for bits in (3, 2):
        x = rng.standard_normal((400, HEAD))
        scale = np.sqrt((x.reshape(len(x), -1, GROUP) ** 2).mean(2)).repeat(GROUP, 1)
        ours = srft_error(x, bits)
        for window in (8, 10):
            table, y = learned(rng, bits, window), x / scale
            error = (((table[viterbi(y, table, bits, window)] - y) * scale) ** 2).mean() / (x**2).mean()
            print(f"{bits} bits: srft{bits} {ours:.5f}, trellis with a window of {window} bits {error:.5f} ({100 * (error / ours - 1):+.1f}%)")


main()
