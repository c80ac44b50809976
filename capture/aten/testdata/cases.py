"""Cases of operators of ATen: what is called, and of which tensors. make.py exports them as one
program each for types; python/tests runs them in the engine."""

import math

import torch
import torch.nn.functional as F

INF, NAN = math.inf, math.nan

# Where functions have kinks, or lose digits; without what is not finite.
KINKS = [0.0, -0.0, 0.5, -0.5, 1.5, -1.5, 2.5, -2.5, 1.0, -1.0, 3.0, -3.0, 6.0, -6.0, 0.25, -0.25, 1e-3, -1e-3, 1e-6,
         -1e-6, 19.0, 21.0, -21.0, 80.0, -80.0, 2.0, -2.0, 0.125]


def tensors(dtype):
    """Gives what cases take, by letter: parameters, and integers, masks and the like."""
    g = torch.Generator().manual_seed(5)
    normal = lambda *size: torch.randn(*size, generator=g)  # noqa: E731
    float_ = {
        "x": normal(2, 3, 4), "y": normal(2, 3, 4), "z": normal(2, 3, 4), "row": normal(4), "col": normal(3, 1),
        "a": normal(4, 3), "b": normal(3, 4), "w": normal(5, 4), "c": normal(2, 4, 5), "v": normal(4), "u": normal(3),
        "k": torch.tensor(KINKS), "plus": normal(2, 3, 4).abs() + 0.1, "unit": torch.rand(2, 3, 4, generator=g),
        "same": torch.tensor([[1.0, 3, 3, 2], [5, 5, 5, 5], [-1, -2, -1, -7]]),
        "zeros": torch.tensor([[1.0, 0, 2, 3], [0, 0, 1, 2], [4, 1, 2, 1]]),
        "logits": normal(6, 5), "image": normal(2, 5, 3, 2), "prob": normal(6, 5).softmax(-1), "cls": normal(5).abs(),
        "q": normal(2, 4, 3, 4), "kv": normal(2, 2, 3, 4), "one": normal(1, 3, 1), "scalar": normal(()),
        "nx": torch.tensor([NAN, 1, 2, NAN, 0.5]), "ny": torch.tensor([1, NAN, 2, NAN, 3.0]),
        "far": torch.tensor([INF, -INF, 1.0, -3.0]), **dict(zip(("gx", "glow", "ghigh"), torch.cartesian_prod(
            torch.arange(4.0), torch.tensor([1.0, 2]), torch.tensor([1.0, 2])).unbind(-1))),
        "edge": torch.tensor([NAN, 1, -1, 0.5, 0.0, -0.0, 2, -2, INF, -INF, -0.25, 1e4, -1e4]),
        "large": torch.tensor([1.5, 1e4, 1e8, 3e8, 1e19, 1e30, 3e38]), "up": torch.tensor([0.0, -0.0, 0, -0.0, 1, -1, -0.0, 0, 2]),
        "right": torch.tensor([0.0, 0, -0.0, -0.0, -0.0, 0, -2, -2, -1]), "ch": normal(2, 4, 3), "chw": normal(4), "chb": normal(4), "hat": normal(3, 4), "hatb": normal(3, 4),
        "square": normal(4, 4), "rel": normal(7, 2),
    }
    fixed = {
        "bad": torch.tensor([NAN, INF, -INF, 1.0, -2.0, 0.0]),
        "badrow": torch.tensor([[1.0, NAN, 3, NAN], [INF, 2, INF, 1], [-INF, -INF, -INF, -INF], [0, -INF, 1, 2]]),
        "i": torch.tensor([[1, 0, 3, 2], [2, 2, 0, 1]]), "j": torch.tensor([[-7, 5, 8, -3], [2, -2, 9, 1]]),
        "labels": torch.tensor([0, 4, 2, -100, 1, 2]), "pixels": torch.tensor([[[0, 1], [4, 2], [3, 3]]] * 2),
        "mask": torch.tensor([[True, False, True, True], [False, False, True, False], [False] * 4]),
        "keys": torch.tensor([[True, True, False], [True, True, True], [True, False, False]]),
        "rows": torch.tensor([1, 0, 1]), "cols": torch.tensor([3, -1, 0]), "var": torch.tensor([0.5, 1, 2, 4]),
        "mu": torch.tensor([0.1, -0.2, 0.3, 0.0]),
        "worst": torch.tensor([[1.0, INF, NAN], [NAN, -INF, 1], [-INF, NAN, INF], [INF, -INF, -INF]]),
        "tiny": torch.tensor([[0, -1, -128, 7], [100, 127, -3, -128]], dtype=torch.int8),
        "byte": torch.tensor([[3, 0, 1, 0], [255, 128, 127, 255]], dtype=torch.uint8),
        "long": torch.tensor([[0, -1, -(2**63), 7], [2**62, 5, -(2**62), -3]]),
    }
    fixed = {n: t.to(dtype) if t.is_floating_point() else t for n, t in fixed.items()}
    return {n: t.to(dtype) for n, t in float_.items()}, fixed


def buffers(dtype):
    """Gives buffers that no state_dict has, by letter: frequencies, a table of no vectors, and one long row."""
    g = torch.Generator().manual_seed(6)
    inv = 1 / 10000 ** (torch.arange(2) / 2)
    table = torch.outer(torch.arange(8.0), inv).repeat(1, 2).cos()
    return {"inv": inv.to(dtype), "cosines": table.to(dtype), "longrow": torch.rand(1100, generator=g).to(dtype)}


def rope(x, inv, angles):
    """Rotates x by angles of positions and frequencies."""
    a = angles(torch.arange(x.shape[1]).to(inv.dtype), inv)
    a = torch.cat([a, a], -1)
    return x * a.cos() + torch.cat([-x[..., 2:], x[..., :2]], -1) * a.sin()


def biased(w, square, rel, i):
    """Is attention with a learned bias of distances, whose heads are the width of an embedding."""
    q, at = F.linear(F.embedding(i, w), square).view(2, 4, 2, 2).transpose(1, 2), torch.arange(4)
    bias = F.embedding((at[:, None] - at[None, :]).clamp(-2, 3) + 3, rel).permute(2, 0, 1)[None]
    scores = (q @ q.mT / 2 + bias).masked_fill(~torch.tril(torch.ones(4, 4, dtype=torch.bool)), -INF)
    return (scores.softmax(-1) @ q).transpose(1, 2).reshape(2, 4, 4)


def each(functions, *letters):
    return [(f"{name} {x}", f, x) for name, f in functions.items() for x in letters]


UNARY = {
    "abs": torch.abs, "sign": torch.sign, "square": torch.square, "expm1": torch.expm1, "tanh": torch.tanh,
    "sigmoid": torch.sigmoid, "floor": torch.floor, "ceil": torch.ceil, "round": torch.round, "trunc": torch.trunc,
    "frac": torch.frac, "atan": torch.atan, "asinh": torch.asinh, "erf": torch.erf, "relu": F.relu, "relu6": F.relu6,
    "silu": F.silu, "leaky_relu": lambda x: F.leaky_relu(x, 0.2), "elu": lambda x: F.elu(x, 1.5), "selu": F.selu,
    "celu": lambda x: F.celu(x, 0.7), "softplus": F.softplus, "softplus b": lambda x: F.softplus(x, 2.0, 5.0),
    "mish": F.mish, "hardswish": F.hardswish, "hardsigmoid": F.hardsigmoid, "hardtanh": F.hardtanh,
    "logsigmoid": F.logsigmoid, "softsign": F.softsign, "tanhshrink": F.tanhshrink, "softshrink": F.softshrink,
    "hardshrink": F.hardshrink, "threshold": lambda x: F.threshold(x, 0.5, 0.25), "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"), "nan_to_num": torch.nan_to_num,
    "clamp": lambda x: x.clamp(-1, 2), "clamp_min": lambda x: x.clamp_min(0.5), "clamp_max": lambda x: x.clamp_max(0.5),
    "neg": torch.neg, "positive": torch.positive, "isnan": torch.isnan, "isinf": torch.isinf,
    "isfinite": torch.isfinite, "logical_not": torch.logical_not, "nan_to": lambda x: torch.where(x.isnan(), 0.0, x),
}
FINITE = {  # grow beyond f32 at kinks, or are not defined for all of them
    "sinh": torch.sinh, "cosh": torch.cosh, "exp2": torch.exp2, "tan": torch.tan, "cube": lambda x: x**3,
    "pow 2.5 of abs": lambda x: x.abs().clamp_min(0.1) ** 2.5, "pow 0": lambda x: x**0, "pow 11": lambda x: x**11,
    "base": lambda x: 2.0**x, "sin": torch.sin, "cos": torch.cos,
}
POSITIVE = {"log": torch.log, "log2": torch.log2, "log10": torch.log10, "log1p": torch.log1p, "sqrt": torch.sqrt,
            "rsqrt": torch.rsqrt, "reciprocal": torch.reciprocal, "pow -1.5": lambda x: x**-1.5,
            "pow 0.3": lambda x: x**0.3, "pow -2": lambda x: x**-2}
INSIDE = {"logit": torch.logit, "asin": torch.asin, "acos": torch.acos, "atanh": torch.atanh, "log1p-": lambda x: torch.log1p(-x)}

REDUCE = {
    "amax": lambda x: x.amax(-1), "amin": lambda x: x.amin(-1), "amax keep": lambda x: x.amax(0, keepdim=True),
    "amax all": torch.amax, "max all": torch.max, "min all": torch.min, "max dim": lambda x: x.max(-1),
    "min dim": lambda x: x.min(0, keepdim=True), "argmax": lambda x: x.argmax(-1), "argmin": lambda x: x.argmin(0, True),
    "argmax all": torch.argmax, "any": lambda x: (x > 1).any(-1), "all": lambda x: (x > -1).all(0), "any all": torch.any,
    "prod": lambda x: x.prod(-1), "prod all": torch.prod, "cumsum": lambda x: x.cumsum(-1),
    "cumsum 0": lambda x: x.cumsum(0), "cumprod": lambda x: x.cumprod(-1), "logsumexp": lambda x: x.logsumexp(-1),
    "logsumexp keep": lambda x: x.logsumexp(0, keepdim=True), "log_softmax": lambda x: x.log_softmax(-1),
    "log_softmax 0": lambda x: x.log_softmax(0), "softmax": lambda x: x.softmax(0), "sum": lambda x: x.sum(0),
    "count": lambda x: x.count_nonzero(-1), "nansum": lambda x: x.nansum(-1), "nanmean": torch.nanmean,
    "nanmean 0": lambda x: x.nanmean(0, keepdim=True), "aminmax": lambda x: torch.aminmax(x, dim=-1),
}
SPREAD = {
    "var": lambda x: x.var(-1), "var all": torch.var, "var 0": lambda x: x.var((0, 1), correction=0, keepdim=True),
    "std": lambda x: x.std(-1), "std 0": lambda x: x.std(0, unbiased=False), "var_mean": lambda x: torch.var_mean(x, -1),
    "std_mean": lambda x: torch.std_mean(x, -1, correction=0), "norm": lambda x: x.norm(dim=-1), "norm all": torch.norm,
    "norm 1": lambda x: x.norm(1, dim=0), "norm inf": lambda x: torch.linalg.vector_norm(x, INF, dim=-1),
    "norm -inf": lambda x: torch.linalg.vector_norm(x, -INF, dim=-1, keepdim=True),
    "norm 3": lambda x: torch.linalg.vector_norm(x, 3, dim=-1), "norm 0": lambda x: torch.linalg.vector_norm(x, 0, dim=-1),
    "normalize": lambda x: F.normalize(x, dim=-1), "mean": lambda x: x.mean((0, -1)),
}
SHAPE = {
    "flip": lambda x: x.flip(0, -1), "roll": lambda x: x.roll(1, -1), "roll 2": lambda x: x.roll((1, -2), (0, 2)),
    "roll all": lambda x: x.roll(5), "tril": torch.tril, "triu 1": lambda x: x.triu(1), "tril -1": lambda x: x.tril(-1),
    "mT": lambda x: x.mT, "swapaxes": lambda x: x.swapaxes(0, -1), "movedim": lambda x: x.movedim(0, -1),
    "movedims": lambda x: x.movedim((0, 1), (2, 0)), "repeat": lambda x: x.repeat(2, 1, 1, 3), "tile": lambda x: x.tile(2),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1), "repeat_interleave flat": lambda x: x.repeat_interleave(2),
    "unbind": lambda x: x.unbind(1), "chunk": lambda x: x.chunk(2, -1), "split": lambda x: x.split([1, 3], -1),
    "tensor_split": lambda x: x.tensor_split(2, 1), "diagonal": lambda x: x.diagonal(0, 1, 2),
    "diagonal 1": lambda x: x.diagonal(1, -2, -1), "diff": lambda x: x.diff(dim=-1),
    "diff ends": lambda x: x.diff(2, dim=1, prepend=x[:, :1] * 2, append=x[:, :2]),
    "reflect": lambda x: F.pad(x, (2, 1), mode="reflect"), "replicate": lambda x: F.pad(x, (2, 1), mode="replicate"),
    "circular": lambda x: F.pad(x, (2, 1), mode="circular"), "reflect 2": lambda x: F.pad(x, (1, 3, 2, 0), mode="reflect"),
    "reflection_pad": lambda x: torch.ops.aten.reflection_pad1d(x, [1, 2]),
    "replication_pad": lambda x: torch.ops.aten.replication_pad2d(x, [1, 2, 0, 1]),
    "vstack": lambda x: torch.vstack([x[0], x[1, 0]]), "hstack": lambda x: torch.hstack([x[0, 0], x[1, 1]]),
    "hstack 2": lambda x: torch.hstack([x, x[:, :1]]), "trace": lambda x: torch.trace(x[0]),
    "empty": lambda x: torch.empty(4).fill_(2.0).to(x.dtype) * x, "squeeze": lambda x: x[:1].squeeze(),
    "squeeze dims": lambda x: x[:1, :, :1].squeeze((0, 2)), "ravel": torch.ravel, "pad": lambda x: F.pad(x, (1, 2)),
    "pad 2": lambda x: F.pad(x, (0, 1, 2, 0), value=1.5), "stack": lambda x: torch.stack([x, x * 2], -2),
    "cat": lambda x: torch.cat([x, x[:, :1]], 1), "expand_as": lambda x: x[:1].expand_as(x),
    "gather": lambda x: x.gather(1, torch.zeros(2, 1, 4, dtype=torch.long)), "select": lambda x: x[:, -1],
    "narrow": lambda x: x.narrow(-1, 1, 2), "unflatten": lambda x: x.unflatten(-1, (2, 2)), "T": lambda x: x[0].T,
    "glu": lambda x: F.glu(x, -1), "permute": lambda x: x.permute(2, 0, 1), "step": lambda x: x[..., ::2],
}
ORDER = {"argmax": lambda x: x.argmax(-1), "argmin": lambda x: x.argmin(-1), "max dim": lambda x: x.max(-1),
         "min dim": lambda x: x.min(-1), "amax": lambda x: x.amax(-1), "amin": lambda x: x.amin(0), "min all": torch.min,
         "max all": torch.max}
BOUND = {"clamp wide": lambda x: x.clamp(0, 200), "clamp low": lambda x: x.clamp(-300, 5), "clamp min": lambda x: x.clamp_min(-1000)}
PAIRS = {
    "maximum": torch.maximum, "minimum": torch.minimum, "fmax": torch.fmax, "fmin": torch.fmin,
    "logaddexp": torch.logaddexp, "atan2": torch.atan2, "rsub": lambda x, y: torch.rsub(x, y),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.5), "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "lerp t": lambda x, y: torch.lerp(x, y, y.sigmoid()), "clamp t": lambda x, y: x.clamp(y, y + 0.5),
    "pow t": lambda x, y: (x.abs() + 0.1) ** y, "remainder": torch.remainder, "fmod": torch.fmod,
    "floor_div": lambda x, y: x.detach() // y.detach(), "trunc_div": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "where": lambda x, y: torch.where(x > y, x, y), "cosine": lambda x, y: F.cosine_similarity(x, y, -1),
    "logical_and": lambda x, y: (x > 0).logical_and(y > 0), "xor": lambda x, y: (x > 0) ^ (y > 0),
    "or": lambda x, y: (x > 0) | (y > 0), "addcdiv": lambda x, y: torch.addcdiv(x, x, y.exp(), value=0.5),
    "mse": F.mse_loss, "mse none": lambda x, y: F.mse_loss(x, y, reduction="none"), "l1": F.l1_loss,
    "l1 sum": lambda x, y: F.l1_loss(x, y, reduction="sum"), "smooth": lambda x, y: F.smooth_l1_loss(x, y, beta=0.5),
    "smooth 0": lambda x, y: F.smooth_l1_loss(x, y, beta=0.0), "huber": lambda x, y: F.huber_loss(x, y, delta=0.7),
    "kl": lambda x, y: F.kl_div(x, y.softmax(-1), reduction="batchmean"),
    "kl log": lambda x, y: F.kl_div(x, y.log_softmax(-1), log_target=True, reduction="sum"),
    "bce logits": lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
    "poisson": lambda x, y: F.poisson_nll_loss(x, y), "soft_margin": lambda x, y: F.soft_margin_loss(x, y.sign().detach()),
}
CASES = (
    each(UNARY, "k", "x", "bad") + each(FINITE, "x") + each(POSITIVE, "plus") + each(INSIDE, "unit")
    + each({"log1p": torch.log1p, "expm1": torch.expm1, "atan": torch.atan}, "unit")
    + each({**REDUCE, **SPREAD}, "x", "same") + each(REDUCE, "badrow") + each({"prod": lambda x: x.prod(-1)}, "zeros")
    + each(SHAPE, "x") + each(ORDER, "worst", "tiny", "byte", "long") + each(BOUND, "tiny", "byte", "j")
    + each({n: f for n, f in ORDER.items() if not n.startswith("arg")}, "mask")
    + each({"atan": torch.atan, "erf": torch.erf, "asinh": torch.asinh, "acosh": torch.acosh, "asin": torch.asin,
            "acos": torch.acos, "atanh": torch.atanh}, "edge")
    + [(f"{n} {x} {y}", f, x, y) for n, f in PAIRS.items() for x, y in (("x", "y"), ("x", "row"))
       if y == "y" or n not in ("kl", "kl log", "cosine", "mse", "mse none", "l1", "l1 sum", "smooth", "smooth 0",
                                "huber", "bce logits", "soft_margin", "poisson")]
    + [
        ("maximum ties", torch.maximum, "same", "zeros"), ("clamp ties", lambda x, y: x.clamp(y, y + 9), "same", "zeros"),
        ("minimum ties", torch.minimum, "same", "zeros"), ("fmin ties", torch.fmin, "same", "zeros"),
        ("logaddexp ties", torch.logaddexp, "same", "zeros"), ("logaddexp bad", lambda x: torch.logaddexp(x, x.flip(0)), "bad"),
        ("logaddexp inf", lambda x: torch.logaddexp(x, x), "bad"), ("maximum nan", torch.maximum, "nx", "ny"),
        ("minimum nan", torch.minimum, "nx", "ny"), ("fmax nan", torch.fmax, "nx", "ny"), ("fmin nan", torch.fmin, "nx", "ny"),
        ("clamp grid", torch.clamp, "gx", "glow", "ghigh"), ("clamp grid min", lambda x, y: x.clamp(min=y), "gx", "glow"),
        ("clamp grid max", lambda x, y: x.clamp(max=y), "gx", "ghigh"), ("clamp nan", torch.clamp, "nx", "ny", "nx"),
        ("clamp nan high", lambda x, y: x.clamp(x.detach() - 1, y), "nx", "ny"), ("clamp nan s", lambda x: x.clamp(-1, 1), "nx"),
        ("clamp int", lambda j, i: j.clamp(i, i + 2), "j", "i"), ("clip", lambda x: torch.clip(x, -1, 0.5), "x"),
        ("amax nan", lambda x: x.amax(-1), "nx"), ("max nan", torch.max, "nx"), ("min nan", torch.min, "nx"),
        ("gelu far", F.gelu, "far"), ("gelu tanh far", lambda x: F.gelu(x, approximate="tanh"), "far"),
        ("nan_to_num far", lambda x: torch.nan_to_num(x, 1.0, 2.0, -3.0), "far"), ("isposinf", torch.isposinf, "bad"),
        ("isneginf", torch.isneginf, "bad"), ("second names", lambda x, y: torch.arctan(torch.absolute(torch.subtract(
            torch.multiply(x, y), torch.true_divide(x, 2)))), "x", "y"), ("greater", lambda x, y: torch.greater(x, y), "x", "y"),
        ("divide", lambda x, y: torch.divide(x, y.exp(), rounding_mode=None), "x", "y"),
        ("scatter_reduce", lambda x, i: x.scatter_reduce(0, i.clamp(max=2), x[:2] * 2, "sum"), "hat", "i"),
        ("scatter_reduce new", lambda x, i: x.scatter_reduce(1, i, x[:2] * 2, "sum", include_self=False), "hat", "i"),
        ("take_along", lambda x, i: x.take_along_dim(i[:, None], -1), "x", "i"),
        ("pow zero", lambda x: (x.clamp_min(0)) ** 1.5, "zeros"),
        ("pow signs", lambda x, j: x.repeat(2)[:8].view(2, 4) ** j.to(x.dtype), "k", "j"), ("minimum bad", torch.minimum, "bad", "bad"),
        ("maximum bad", lambda x: torch.maximum(x, x.flip(0)), "bad"), ("l1 ties", F.l1_loss, "same", "zeros"),
        ("norm zero", lambda x: (x * 0).norm(dim=-1), "zeros"), ("std of one", lambda x: x[..., :1].std(-1), "x"),
        ("kl zero", lambda x, y: F.kl_div(x, y.detach(), reduction="none"), "same", "zeros"),
        ("bce", lambda x, y: F.binary_cross_entropy(x, y.sigmoid(), weight=y.exp().detach()), "unit", "y"),
        ("bce edge", lambda x: F.binary_cross_entropy((x > 0.5).to(x.dtype) * 1.0, x.detach(), reduction="none"), "unit"),
        ("bce pos", lambda x, y, w: F.binary_cross_entropy_with_logits(x, y.sigmoid(), pos_weight=w.exp().detach()), "x", "y", "row"),
        ("bce weight", lambda x, w: F.binary_cross_entropy_with_logits(x, x.detach().sigmoid(), weight=w.detach(), reduction="sum"),
         "x", "row"),
        ("bce far", lambda x: F.binary_cross_entropy_with_logits(x, (x > 0).to(x.dtype), reduction="none"), "k"),
        ("cross", lambda x, t: F.cross_entropy(x, t), "logits", "labels"),
        ("cross smooth", lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), "logits", "labels"),
        ("cross weight", lambda x, t, w: F.cross_entropy(x, t, w.detach(), label_smoothing=0.2), "logits", "labels", "cls"),
        ("cross ignore", lambda x, t: F.cross_entropy(x, t, ignore_index=2, reduction="sum"), "logits", "labels2"),
        ("cross none", lambda x, t, w: F.cross_entropy(x, t, w.detach(), reduction="none"), "logits", "labels", "cls"),
        ("cross soft", lambda x, p: F.cross_entropy(x, p, label_smoothing=0.1), "logits", "prob"),
        ("cross soft weight", lambda x, p, w: F.cross_entropy(x, p, w.detach(), reduction="sum"), "logits", "prob", "cls"),
        ("cross image", lambda x, t: F.cross_entropy(x, t), "image", "pixels"),
        ("cross one", lambda x, t: F.cross_entropy(x[0], t[0]), "logits", "labels"),
        ("nll", lambda x, t: F.nll_loss(x.log_softmax(-1), t), "logits", "labels"),
        ("nll weight", lambda x, t, w: F.nll_loss(x, t, w.detach(), reduction="sum"), "logits", "labels", "cls"),
        ("nll image", lambda x, t: F.nll_loss(x, t, reduction="none"), "image", "pixels"),
        ("one_hot", lambda i: F.one_hot(i, 5), "i"), ("one_hot x", lambda w, i: F.one_hot(i, 5).to(w.dtype) @ w, "w", "i"),
        ("cumsum int", lambda i: i.cumsum(-1) - 1, "i"), ("cumsum mask", lambda m: m.cumsum(-1), "mask"),
        ("int div", lambda j, i: j // (i + 1), "j", "i"), ("int mod", lambda j, i: j % (i + 2), "j", "i"),
        ("int trunc", lambda j: torch.div(j, 3, rounding_mode="trunc"), "j"), ("int mod s", lambda j: j % 3, "j"),
        ("int fmod", lambda j: j.fmod(3), "j"), ("int abs", lambda j: j.abs(), "j"), ("int amax", lambda j: j.amax(-1), "j"),
        ("int max", lambda j: j.max(0), "j"), ("int sign", lambda j: j.sign(), "j"), ("int min", lambda j: j.min(), "j"),
        ("int prod", lambda j: j.prod(-1), "j"), ("int argmin", lambda j: j.argmin(-1), "j"),
        ("mask and", lambda m, k: m & ~m.flip(-1), "mask", "mask"), ("mask any", lambda m: m.any(-1), "mask"),
        ("mask all", lambda m: m.all(0), "mask"), ("masked_fill", lambda x, m: x.masked_fill(m, 0.5), "x", "mask"),
        ("masked_fill t", lambda x, m, s: x.masked_fill(m, s), "x", "mask", "scalar"),
        ("where s", lambda x, m: torch.where(m, x, 0.25), "x", "mask"), ("where ss", lambda m: torch.where(m, 1.0, -1.0), "mask"),
        ("where sx", lambda x, m: torch.where(m, -2.0, x), "x", "mask"),
        ("bool sum", lambda m: m.sum(-1), "mask"), ("mean mask", lambda x, m: (x * m).sum(-1) / m.sum(-1).clamp(min=1), "x", "mask"),
        ("matmul", torch.matmul, "a", "b"), ("mv", torch.mv, "a", "u"), ("matmul v", lambda x, v: x @ v, "x", "v"),
        ("v matmul", lambda v, c: v @ c, "v", "c"), ("dot", lambda v, w: v @ w, "v", "row"), ("dot f", torch.dot, "v", "row"),
        ("outer", torch.outer, "v", "u"), ("bmm", torch.bmm, "x", "c"), ("addmm", lambda b, x, w: torch.addmm(
            b, x[0], w.mT, beta=0.5, alpha=2.0), "cls", "x", "w"),
        ("baddbmm", lambda b, x, c: torch.baddbmm(b, x, c, beta=0.5, alpha=2.0), "cls", "x", "c"),
        ("addmv", lambda u, a, v: torch.addmv(u, a.mT, v), "u", "a", "v"),
        ("einsum lone", lambda x, c: torch.einsum("bij,bkj->b", x, c.mT), "x", "c"),
        ("einsum implicit", lambda x, c: torch.einsum("bij,bjk", x, c), "x", "c"),
        ("einsum dots", lambda x, a: torch.einsum("...j,jk->...k", x, a), "x", "a"),
        ("einsum one", lambda x: torch.einsum("bij->jb", x), "x"), ("einsum sum", lambda x: torch.einsum("bij->", x), "x"),
        ("einsum three", lambda x, a, u: torch.einsum("bij,jk,k->bi", x, a, u), "x", "a", "u"),
        ("group_norm", lambda x, w, b: F.group_norm(x, 2, w, b), "ch", "chw", "chb"),
        ("group_norm image", lambda x: F.group_norm(x[:, :4], 2), "image"),
        ("instance_norm", lambda x: F.instance_norm(x), "ch"),
        ("batch_norm", lambda x, mu, var, w, b: F.batch_norm(x, mu, var, w, b), "ch", "mu", "var", "chw", "chb"),
        ("batch_norm own", lambda x: F.batch_norm(x, None, None, training=True), "ch"),
        ("layer_norm 2", lambda x, w, b: F.layer_norm(x, (3, 4), w, b), "x", "hat", "hatb"),
        ("rms_norm", lambda x, w: F.rms_norm(x, (4,), w, 1e-5), "x", "row"),
        ("rms_norm none", lambda x: F.rms_norm(x, (4,)), "x"), ("prelu", lambda x, w: F.prelu(x, w), "ch", "chw"),
        ("index two", lambda x, r, c: x[:, r, c], "x", "rows", "cols"), ("index first", lambda x, r, c: x[r, c], "x", "rows", "rows"),
        ("gather 0", lambda b, i: b.gather(0, i.clamp(max=2)), "hat", "i"), ("gather part", lambda b, i: b.gather(1, i), "hat", "i"),
        ("scatter_add", lambda x, r: torch.zeros(3, 4).to(x.dtype).scatter_add(0, r[None].expand(3, 3), x[0, :, :3]), "x", "rows_skip"),
        ("scatter value", lambda x: x.scatter(1, torch.zeros(2, 1, 4, dtype=torch.long), 7.0), "x"),
        ("scatter src", lambda x, y: x.scatter(-1, torch.zeros(2, 3, 1, dtype=torch.long), y[..., :1]), "x", "y"),
        ("index_fill", lambda x, r: x.index_fill(1, r, 0.5), "x", "rows"),
        ("sdpa gqa", lambda q, k, m: F.scaled_dot_product_attention(q, k, k, m, enable_gqa=True, scale=0.3), "q", "kv", "keys"),
        ("sdpa gqa causal", lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True), "q", "kv"),
        ("sdpa bias", lambda q, b: F.scaled_dot_product_attention(q, q, q, b[:, :3]), "q", "hat"),
        ("tril ones", lambda q: (q @ q.mT).masked_fill(torch.ones(3, 3).tril() == 0, -INF).softmax(-1) @ q, "q"),
        ("triu inf", lambda q: ((q @ q.mT) + torch.full((3, 3), -1e9).triu(1).to(q.dtype)).softmax(-1) @ q, "q"),
        ("eye", lambda x: x @ torch.eye(4).to(x.dtype), "x"), ("linspace", lambda x: x * torch.linspace(0, 1, 4).to(x.dtype), "x"),
        ("triplet", lambda x, y, z: F.triplet_margin_loss(x, y, z), "x", "y", "z"),
        ("margin", lambda x, y: F.margin_ranking_loss(x, y, y.sign().detach(), 0.1), "x", "y"),
        ("cosine loss", lambda x, y: F.cosine_embedding_loss(x[0], y[0], torch.tensor([1, -1, 1])), "x", "y"),
        ("hinge", lambda x: F.hinge_embedding_loss(x, torch.ones(4), 0.5), "x"),
        ("slice_scatter", lambda x, y: x.slice_scatter(y[..., 1:], -1, 0, 3), "x", "y"),
        ("select_scatter", lambda x, y: x.select_scatter(y[:, 0], 1, -1), "x", "y"),
        ("pow 2.5 bad", lambda x: x**2.5, "bad"), ("pow -1.5 bad", lambda x: x**-1.5, "bad"),
        ("pow of -2", lambda x: (-2.0) ** x.detach(), "k"), ("atan2 signs", torch.atan2, "up", "right"),
        ("acosh", torch.acosh, "large"), ("asinh large", torch.asinh, "large"),
        ("index_put last", lambda x, y, r: x.index_put((r,), torch.cat([y, y[:1] * 2])), "x", "y", "rows"),
        ("index_put known", lambda x: x.clone().index_put_((torch.tensor([0, 0, 1]),), torch.ones(3, 3, 4).to(x.dtype)), "x"),
        ("index_copy last", lambda x, y, r: x.index_copy(0, r, torch.cat([y, y[:1] * 2])), "x", "y", "rows"),
        ("scatter last", lambda x, y, i: x.scatter(1, i, y[:2]), "hat", "hatb", "i"),
        ("scatter half", lambda x, i: x.scatter(1, i, 0.5), "hat", "i"),
        ("rope mul", lambda x, v: rope(x, v, lambda p, v: p[:, None] * v), "x", "inv"), ("rope outer", lambda x, v: rope(
            x, v, torch.outer), "x", "inv"), ("rope square", lambda x, v: rope(x[:, :2], v, torch.outer), "x", "inv"),
        ("rope table", lambda x, t: x * t[:3] + x * t[5:], "x", "cosines"), ("long row", lambda x, t: x * t[-4:] + t.sum(), "x", "longrow"),
        ("position bias", biased, "w", "square", "rel", "i"),
        ("in place", lambda x: (x * 1).swapaxes(0, 1).abs_().mT.mul_(2).sum(0), "x"),
    ]
)


class Cases(torch.nn.Module):
    """Computes cases: each has its own parameters."""

    def __init__(self, dtype=torch.float32, names=None):
        super().__init__()
        trained, self.fixed = tensors(dtype)
        kept = buffers(dtype)
        self.fixed["labels2"] = self.fixed["labels"].clamp(min=0)
        self.fixed["rows_skip"] = self.fixed["rows"]
        self.cases = [c for c in CASES if names is None or c[0] in names]
        self.letters = sorted({x for c in self.cases for x in c[2:] if x in self.fixed})
        for k, (_, _, *letters) in enumerate(self.cases):
            for x in letters:
                if x in trained:
                    self.register_parameter(f"p{k}_{x}", torch.nn.Parameter(trained[x].clone()))
                elif x in kept:
                    self.register_buffer(f"p{k}_{x}", kept[x].clone(), persistent=False)

    def inputs(self):
        return tuple(self.fixed[x] for x in self.letters)

    def forward(self, *given):
        fixed, out = dict(zip(self.letters, given)), []
        for k, (name, f, *letters) in enumerate(self.cases):
            y = f(*(fixed[x] if x in fixed else getattr(self, f"p{k}_{x}") for x in letters))
            out.append(tuple(y) if isinstance(y, (tuple, list)) else (y,))
        return out
