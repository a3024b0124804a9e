"""The keyword arguments: one list, with one meaning, wherever they are taken."""

import dataclasses
import inspect
import json
import operator
import pathlib
import re
import subprocess
import sys
from typing import Any, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa
import pallas_fa.nn
from pallas_fa import context_parallel, masks, scores
from pallas_fa.arguments import other_libraries
from pallas_fa.arguments.keywords import Arguments
from pallas_fa.backends.mma import config as mma_config

NAMES = tuple(get_type_hints(Arguments))
FUNCTIONS = (
    pallas_fa.dot_product_attention,
    pallas_fa.explain,
    context_parallel.ring_attention,
    context_parallel.all_to_all_attention,
    context_parallel.decode_attention,
    pallas_fa.nn.attention_fn,
)
ROOT = pathlib.Path(__file__).parent.parent
X = jnp.ones((1, 4, 2, 8))


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_every_function_takes_all_arguments_with_the_same_defaults(function):
    ours = inspect.signature(function).parameters
    of_api = inspect.signature(pallas_fa.dot_product_attention).parameters
    for name in ("query", "key", "value", "bias", "mask", "implementation", *NAMES):
        if (function, name) == (pallas_fa.nn.attention_fn, "broadcast_dropout"):
            assert ours[name].default is True, "as in Flax"
        else:
            assert ours[name].default == of_api[name].default, name
        assert ours[name].kind == of_api[name].kind, name


@pytest.mark.parametrize(
    "explain, function",
    (
        (pallas_fa.explain, pallas_fa.dot_product_attention),
        (pallas_fa.cache.explain, pallas_fa.paged_attention),
        (pallas_fa.mla.explain, pallas_fa.mla_decode_attention),
    ),
)
def test_explain_has_the_signature_of_what_it_explains(explain, function):
    default = lambda f: {name: (p.kind, p.default) for name, p in inspect.signature(f).parameters.items()}
    assert default(explain) == default(function)
    with pytest.raises(TypeError, match=r"^explain\(\) missing"):
        explain()


def test_each_argument_is_documented_once():
    doc = pallas_fa.dot_product_attention.__doc__
    for name in inspect.signature(pallas_fa.dot_product_attention).parameters:
        assert doc.count(f"\n      {name}: ") == 1, name
        assert (ROOT / "docs" / "arguments.md").read_text().count(f"\n| `{name}` | ") == 1, name


@pytest.mark.parametrize("function", (pallas_fa.dot_product_attention, pallas_fa.explain, pallas_fa.nn.attention_fn))
def test_an_unknown_argument_is_named(function):
    with pytest.raises(TypeError, match="is_casual=True is not an argument.*Did you mean is_causal"):
        function(X, X, X, is_casual=True)
    with pytest.raises(TypeError, match="typo=1 is not an argument.*known are scale"):
        function(X, X, X, typo=1)


# Arguments of flash-attn, PyTorch, FlexAttention, Tokamax and JAX's TPU kernels, and what the error says to write.
ELSEWHERE = {
    "softmax_scale": r"Pass scale=",
    "sm_scale": r"Pass scale=",
    "logits_scale": r"Pass scale=",
    "causal": r"Pass is_causal=True.*Causal\('bottom_right'\)",
    "window_size": r"Pass local_window_size=.*None for -1.*Window\(left, right, align='bottom_right'\)",
    "sliding_window": r"Pass local_window_size=\(n - 1, 0\)",
    "softcap": r"Pass logits_soft_cap=.*None for 0",
    "attn_mask": r"Pass mask= .*or bias=",
    "attn_bias": r"Pass bias=",
    "position_bias": r"Pass bias=",
    "key_padding_mask": r"Pass mask=~key_padding_mask\[:, None, None, :\]",
    "block_table": r"Call pallas_fa.paged_attention",
    "dropout_p": r"Pass dropout_rate=.*dropout_key=",
    "enable_gqa": r"Leave it out: .*fewer heads",
    "score_mod": r"Pass score=pallas_fa.scores.Custom\(fn\)",
    "mask_mod": r"Pass mask=pallas_fa.masks.Custom\(fn\)",
    "block_mask": r"Pass mask=.*block_mask\(mask, T, S\)",
    "alibi_slopes": r"Pass score=pallas_fa.scores.Alibi\(slopes, align='bottom_right'\)",
    "s_aux": r"Pass sinks=",
    "cu_seqlens_q": r"Pass mask=pallas_fa.masks.from_cu_seqlens\(cu_q, cu_k, T=T\)",
    "return_lse": r"Pass return_residual=True",
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_an_argument_of_another_library_is_answered_with_ours(name):
    for function in (pallas_fa.dot_product_attention, pallas_fa.explain, pallas_fa.nn.attention_fn):
        with pytest.raises(TypeError, match=f"^{name}=7 is not an argument here. {ELSEWHERE[name]}"):
            function(X, X, X, **{name: 7})
    with pytest.raises(TypeError, match=rf"^{name} of shape \(1, 4, 2, 8\) is not an argument here"):
        pallas_fa.dot_product_attention(X, X, X, **{name: X})


def test_the_advice_for_another_library_is_made_of_ours():
    """What the errors say to pass is an argument, or a name of the package."""
    known = inspect.signature(pallas_fa.dot_product_attention).parameters
    for advice in other_libraries.INSTEAD.values():
        assert set(re.findall(r"\b(?:Pass|or|as|is) (\w+)=", advice)) <= set(known)
        for path in re.findall(r"pallas_fa\.([\w.]*\w)", advice):
            assert operator.attrgetter(path)(pallas_fa) is not None


def test_a_misspelt_argument_that_is_no_option():
    with pytest.raises(TypeError, match="implementaton='xla' is not an argument.*Did you mean implementation"):
        pallas_fa.dot_product_attention(X, X, X, implementaton="xla")


def test_explain_takes_scalars_of_numpy_as_the_call_does():
    """A flag, and a scale that is static: a traced one would be another problem."""
    x = jnp.ones((1, 256, 2, 64), jnp.bfloat16)
    for name, ours, of_numpy in (("is_causal", True, np.True_), ("scale", 0.5, np.float32(0.5))):
        assert pallas_fa.explain(x, x, x, **{name: of_numpy}) == pallas_fa.explain(x, x, x, **{name: ours})


@pytest.mark.parametrize("keyword", ["scale", "logits_soft_cap", "local_window_size"])
def test_scalars_of_numpy_of_16_bits_are_the_numbers_that_they_hold(keyword):
    """NumPy rounds a number of Python to the dtype of the scalar beside it: a bound became inf, with a warning."""
    out = pallas_fa.dot_product_attention(X, X, X, **{keyword: np.float16(2)})
    np.testing.assert_array_equal(out, pallas_fa.dot_product_attention(X, X, X, **{keyword: 2}))
    if keyword != "local_window_size":
        with pytest.raises(ValueError, match=f"{keyword}=inf must be"):
            pallas_fa.dot_product_attention(X, X, X, **{keyword: np.float16(np.inf)})


def test_none_is_what_is_not_given():
    out = pallas_fa.dot_product_attention(X, X, X, **dict.fromkeys(NAMES))
    np.testing.assert_array_equal(out, pallas_fa.dot_product_attention(X, X, X))


@pytest.mark.parametrize(
    ("keywords", "message"),
    (
        ({"mask": masks.Causal}, r"mask is the class Causal.*mask=Causal\(\.\.\.\)"),
        ({"mask": "causal"}, "mask='causal' is a str; it must be a bool array"),
        ({"mask": scores.SoftCap(3.0)}, "mask is a SoftCap.*Pass it as `score=`"),
        ({"mask": (masks.Causal(), masks.Window(3, 0))}, "is a tuple; it must be a bool array.* Combine masks by `&`"),
        ({"bias": scores.SoftCap(3.0)}, "bias is a SoftCap.*Pass it as `score=`"),
        ({"bias": masks.Causal()}, "bias is a Causal.*Pass it as `mask=`"),
        ({"score": masks.Causal()}, "score is a Causal.*Pass it as `mask=`"),
        ({"score": scores.SoftCap}, "score is the class SoftCap"),
        ({"bias": "alibi"}, "bias='alibi' is a str"),
    ),
)
def test_one_kind_of_argument_for_another(keywords, message):
    for function in (pallas_fa.dot_product_attention, pallas_fa.explain):
        with pytest.raises(TypeError, match=message):
            function(X, X, X, **keywords)


def test_shapes_are_for_explain():
    shape = jax.ShapeDtypeStruct(X.shape, X.dtype)
    with pytest.raises(TypeError, match=r"^query=ShapeDtypeStruct\(.*has no values.*pallas_fa.explain.*jax.eval_shape"):
        pallas_fa.dot_product_attention(shape, shape, shape)
    with pytest.raises(TypeError, match="^bias=ShapeDtypeStruct.*has no values"):
        pallas_fa.dot_product_attention(X, X, X, bias=jax.ShapeDtypeStruct((4, 4), X.dtype))
    ints, scalar = jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((), jnp.float32)
    held: dict[str, dict[str, Any]] = {
        "key_value_seq_lengths=": {"key_value_seq_lengths": ints},
        "local_window_size holds": {"local_window_size": (ints, 0)},
        "mask holds": {"mask": masks.Causal() & masks.Causal(offset=ints)},
        "score holds": {"score": scores.Alibi(jax.ShapeDtypeStruct((2,), jnp.float32))},
        "scale=": {"scale": scalar},
    }
    for shown, keywords in held.items():
        assert "reference" in pallas_fa.explain(X, X, X, **keywords)
        with pytest.raises(TypeError, match=f"^{shown} ?ShapeDtypeStruct.*has no values"):
            pallas_fa.dot_product_attention(X, X, X, **keywords)


class Tensor:
    """An array of a library whose dtypes are its own."""

    shape, ndim, dtype = (1, 4, 2, 8), 4, "torch.float32"


@pytest.mark.parametrize(
    ("keywords", "message"),
    (
        ({"query": Tensor()}, "query=.* is a Tensor; it must be a float array .* Pass an array of JAX or NumPy"),
        ({"query": np.full((1, 4, 2, 8), None)}, "query.dtype=object must be a float type"),
        ({"bias": Tensor()}, "bias=.* is a Tensor; it must be an array"),
        ({"mask": Tensor()}, "mask=.* is a Tensor; it must be a bool array"),
        (
            {"query_seq_lengths": Tensor()},
            "query_seq_lengths is a Tensor; it must be an int array. Pass one of JAX or NumPy",
        ),
        ({"dropout_rate": 0.1, "dropout_key": Tensor()}, "dropout_key=.* is of type Tensor; it must be a JAX PRNG key"),
    ),
)
def test_arrays_of_other_libraries(keywords, message):
    for function in (pallas_fa.dot_product_attention, pallas_fa.explain):
        with pytest.raises(TypeError, match=message):
            function(**{"query": X, "key": X, "value": X} | keywords)


def test_masks_and_scores_are_not_true_or_false():
    with pytest.raises(TypeError, match="a Causal is not True or False.*`&`"):
        _ = masks.Causal() and masks.Window(3, 0)
    with pytest.raises(TypeError, match="a Causal has no opposite.*Custom"):
        _ = ~masks.Causal()
    with pytest.raises(TypeError, match="a SoftCap is not True or False.*`then`"):
        _ = scores.SoftCap(1.0) or None


@pytest.mark.parametrize("array", (np.ones((4, 4), bool), jnp.ones((4, 4), bool)), ids=("numpy", "jax"))
def test_an_array_does_not_combine_with_a_mask(array):
    for combine in (lambda a, b: a & b, lambda a, b: b | a):
        with pytest.raises(TypeError, match=r"Wrap a bool array as pallas_fa.masks.Dense\(array\)"):
            combine(array, masks.Causal())
    with pytest.raises(TypeError, match="the class Window: make a mask of it"):
        _ = masks.Causal() & masks.Window  # pyright: ignore[reportOperatorIssue]


def test_one_length_of_queries_without_batch_dims():
    q = X[0]
    for lengths in ({"key_value_seq_lengths": 2}, {"key_value_seq_lengths": np.array([2])}, {"query_seq_lengths": [2]}):
        batched = {name: np.reshape(x, 1) for name, x in lengths.items()}
        want = pallas_fa.dot_product_attention(X[:1], X[:1], X[:1], **batched)[0]
        np.testing.assert_array_equal(pallas_fa.dot_product_attention(q, q, q, **lengths), want)


# ---- advice works when it is followed -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "index"),
    (((2, 7), ":, None, None, :"), ((2, 5, 7), ":, None, :, :"), ((3, 7), ":, None, :"), ((2, 3), ":, :")),
)
def test_how_to_align_a_mask(shape, index):
    q, k = jnp.ones((2, 5, 3, 8)), jnp.ones((2, 7, 3, 8))
    mask = np.ones(shape, bool)
    with pytest.raises(ValueError) as error:
        pallas_fa.dot_product_attention(q, k, k, mask=mask)
    advice = f"mask[{index}"
    assert advice in str(error.value)
    written = str(error.value).rsplit("`", 2)[1]
    aligned = eval(written, {"mask": mask})
    expected = jnp.ones_like(q)
    np.testing.assert_allclose(pallas_fa.dot_product_attention(q, k, k, mask=aligned), expected, rtol=1e-6)


@pytest.mark.parametrize("shape", ((2, 5), (3, 5), (2, 1, 5), (4,)))
def test_how_to_align_a_mask_that_fits_in_several_ways(shape):
    """With T == S each way is named by its dims: the first that comes to mind may not be the one that is meant."""
    x = jnp.ones((2, 5, 3, 8)) if shape != (4,) else jnp.ones((4, 5, 4, 8))
    mask = np.ones(shape, bool)
    with pytest.raises(ValueError) as error:
        pallas_fa.dot_product_attention(x, x, x, mask=mask)
    sizes = dict(zip("BTN", x.shape, strict=False)) | {"S": 5, "1": 1}
    advice = re.findall(r"`(mask\[[^`]*)` if it is \[([^]]*)\]", str(error.value))
    fitting = {dims.replace(", ", "") for _, dims in advice}
    assert (
        fitting
        == {"25": {"BT", "BS"}, "35": {"NT", "NS"}, "215": {"B1T", "B1S"}, "4": {"B", "N"}}["".join(map(str, shape))]
    )
    for written, dims in advice:
        aligned = eval(written, {"mask": mask})
        named = [1 if letter not in dims.split(", ") else sizes[letter] for letter in "BNTS"]
        assert aligned.shape == tuple(named)[-aligned.ndim :], (written, dims)
        pallas_fa.dot_product_attention(x, x, x, mask=aligned)


def test_two_dims():
    q = jnp.ones((5, 8))
    with pytest.raises(ValueError, match=r"pass `query\[:, None\]`"):
        pallas_fa.dot_product_attention(q, q, q)
    assert pallas_fa.dot_product_attention(q[:, None], q[:, None], q[:, None]).shape == (5, 1, 8)
    with pytest.raises(ValueError, match=r"pass `query\[None\]`"):
        pallas_fa.dot_product_attention(q, q, q, layout="BNTH")


def test_a_config_for_nobody():
    with pytest.raises(NotImplementedError, match="Leave config out.$"):
        pallas_fa.dot_product_attention(X, X, X, config=3)


# ---- what the package shows ---------------------------------------------------------------------------------------------


def test_the_package_shows_its_public_names_only():
    attention = {"dot_product_attention", "mla_decode_attention", "paged_attention", "ragged_paged_attention"}
    public = attention | {"explain", "cache", "context_parallel", "masks", "mla", "mosaic_gpu", "nn", "scores"}
    assert {name for name in dir(pallas_fa) if not name.startswith("__")} == public
    assert len(pallas_fa.__doc__.splitlines()) > 5
    with pytest.raises(AttributeError, match="no_such_name"):
        pallas_fa.no_such_name  # noqa: B018


def test_nn_and_the_configs_are_there_when_asked_for():
    code = "import sys, pallas_fa; assert 'flax' not in sys.modules; pallas_fa.nn.linen; pallas_fa.mosaic_gpu.config.Config"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_config_classes_keep_their_public_name():
    public = pallas_fa.mosaic_gpu.config
    assert public.Config(forward=public.ForwardConfig(2), backward=public.BackwardConfig(2)).forward.block_q == 128


@pytest.mark.parametrize("module", (pallas_fa.mosaic_gpu.config, mma_config), ids=("hopper", "mma"))
def test_fields_of_a_config_have_their_types(module):
    """A flag of text counts as True, and 1.5 stages or heads are past many a comparison."""
    for kind in ("ForwardConfig", "BackwardConfig", *(["DecodeConfig"] if module is mma_config else [])):
        for field in dataclasses.fields(getattr(module, kind)):
            for value in ("no", None, 1.5, [2, 2], np.ones(2), 1 if type(field.default) is bool else True):
                with pytest.raises(TypeError, match=rf"^{field.name}=.* must be .*Leave it out for the default, "):
                    getattr(module, kind)(**{field.name: value})


def test_the_tiles_of_other_kernels_are_refused_by_name():
    hopper, by_mma = pallas_fa.mosaic_gpu.config, mma_config
    for config, other, module in ((hopper, by_mma, "pallas_fa.mosaic_gpu.config"), (by_mma, hopper, by_mma.__name__)):
        with pytest.raises(TypeError, match=f"ForwardConfig of {module}, or None"):
            config.Config(forward=other.ForwardConfig())
    told = pallas_fa.explain(X, X, X, config=by_mma.Config())
    assert "mosaic_gpu: cannot" in told and "it takes a pallas_fa.mosaic_gpu.config.Config or None" in told


USER = """
import jax
import pallas_fa
from pallas_fa import masks, scores

def attend(x: jax.Array):
    reveal_type(pallas_fa.dot_product_attention(x, x, x, is_causal=True, mask=masks.Causal() & masks.Window(3, 0)))
    reveal_type(pallas_fa.dot_product_attention(x, x, x, score=scores.SoftCap(3.0), return_residual=True))
    reveal_type(pallas_fa.paged_attention(x, x, x, x, x))
    reveal_type(pallas_fa.paged_attention(x, x, x, x, x, return_residual=True))
    pallas_fa.dot_product_attention(x, x, x, is_causal="yes")
    pallas_fa.dot_product_attention(x, x, x, is_casual=True)
"""


def test_a_type_checker_knows_what_a_call_returns(tmp_path):
    """In strict mode: the types of both results, and an error for each of the two wrong calls, and none else."""
    (tmp_path / "user.py").write_text(USER)
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": "strict", "extraPaths": [str(ROOT)]}))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(tmp_path)]
    found = json.loads(subprocess.run(command, capture_output=True, text=True).stdout)["generalDiagnostics"]
    said = [(x["severity"], x["range"]["start"]["line"]) for x in found]
    assert said == [*(("information", line) for line in (6, 7, 8, 9)), ("error", 10), ("error", 11)], found
    assert all('"Array"' in found[i]["message"] for i in (0, 2))
    assert all('"tuple[Array, Array]"' in found[i]["message"] for i in (1, 3))
