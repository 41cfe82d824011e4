"""A handle is an array to a user's loop: what a `jax.Array` of the same contents gives, or raises."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import shardwright as sw
from shardwright.errors import LargeFetchWarning
from tests.tables import list_failing_rows

# fmt: off
PYTHON = (
    "s == 3", "s != s", "q != q", "s < 1", "w <= 2", "1 > s", "w >= w", "w+1", "1+w", "w+w", "1-w", "w*s", "1/s",
    "w//2", "7%s", "w**2", "2**w", "divmod(w,2)", "divmod(7,s)", "w@w.T", "n&1", "1|n", "n^n", "n<<1", "8>>n", "~n",
    "-w", "+w", "abs(-w)", "w+[1,2]", "w+'a'", "w==None", "w==[1,2]", "s=='a'", "s=={1}", "s<object()", "float(s)",
    "int(s)", "complex(s)", "bool(f)", "bool(w)", "float(w)", "int(w)", "operator.index(n)", "operator.index(s)",
    "operator.index(w)", "list(range(n))", "float(one)", "bool(one)", "complex(c)", "float(c)", "round(s)",
    "round(s,2)", "round(w,1)", "f'{s:.3f}'", "f'{s}'", "f'{n:05d}'", "f'{w}'", "f'{w:.1f}'", "str(s)", "str(w)",
    "'%.2f' % s", "math.trunc(s)", "math.floor(s)", "math.ceil(s)", "math.isnan(q)", "math.sqrt(s)", "w[0]", "w[-1]",
    "w[1,2]", "w[1:, ::2]", "w[w>2]", "w[...,0]", "w[None]", "w[jnp.array([0,1])]", "w[n]", "w[0,0,0]", "w[1.5]",
    "w[[0,1]]", "[1,2,3,4][n]", "w.__setitem__(0,1)", "w.at[0].set(0)", "w.at[n,1].add(5)", "w.at[0].multiply(s)",
    "w.at[0].get()", "w.at[0].divide(2)", "list(w)", "list(s)", "len(w)", "len(s)", "2.0 in w[0]", "3 in v", "[*v]",
    "sum(r.sum() for r in w)", "[a+b for a,b in zip(v,v)]", "list(reversed(v))", "w.nbytes", "w.itemsize", "w.ndim",
    "w.size", "w.shape", "w.dtype", "w.T", "w.mT", "c.real", "c.imag", "w.flat", "s.weak_type", "str(w.aval)",
    "w.astype(jnp.int32)", "w.reshape(4,3)", "w.reshape(-1)", "w.ravel()", "w.flatten()", "w.transpose(1,0)",
    "w.swapaxes(0,1)", "one.squeeze()", "w.sum()", "w.sum(axis=0)", "w.mean(0)", "max([s,1.0])", "min(s,n)",
    "w.std()", "w.var()", "w.prod()", "(w>3).any()", "f.all()", "w.argmax(-1)", "w.cumsum(0)", "w.dot(w.T)",
    "w.clip(1,3)", "w.sort()", "w.argsort()", "w.take(jnp.array([1]))", "w.repeat(2)", "c.conj()", "w.trace()",
    "w.diagonal()", "w.nonzero()", "w.round(1)", "w.view(jnp.int32)", "v.searchsorted(3)", "s.item()", "w.item()",
    "w.item(3)", "w.tolist()", "w.tobytes()", "w.copy()", "copy.copy(w)", "copy.deepcopy({'w':w})",
    "copy.deepcopy([w,(s,)])", "hash(w)", "{s}", "{s:1}", "isinstance(w,jax.Array)", "added_in_place(w,1)",
    "multiplied_in_place(w,w)", "sum([s,s])", "sorted([s,n,0])", "sum([s,s])/2", "math.fsum([s,s])", "bf+1", "bf==bf",
    "f'{bf}'", "float(bf[0])", "i8+1", "u32-1", "~f", "f & True", "f==True", "not f", "fp8.astype(jnp.float32)+1",
    "w.is_deleted()", "w.devices()", "w.device", "w.addressable_shards[0].data", "w.is_fully_addressable",
    "w.to_device(jax.devices()[0])", "w.__array_namespace__().__name__",
)
NUMPY = (
    "np.add(w,1)", "np.ones((2,3),np.float32)@w", "np.arange(9)[n]", "np.isnan(w)", "np.mean(w)", "np.sum(w,axis=0)",
    "np.float32(3)*w", "np.stack([s,s])", "np.array([s,s])", "np.asarray(w)", "np.asarray(w,dtype=np.int32)",
    "np.allclose(w,w)", "np.testing.assert_array_equal(w,w)", "np.where(w>2,w,0)", "np.dot(w,w.T)", "np.argmax(w)",
    "added_in_place(np.zeros((3,4),np.float32),w)", "np.median(w)", "np.unique(n)", "np.concatenate([w,w])",
    "np.max(w)", "np.full(2,s)", "np.shape(w)", "np.ndim(w)", "np.size(w)", "np.copy(w)", "np.iscomplexobj(c)",
)
JAX = (
    "jnp.ones(4)+w", "jnp.arange(9)[n]", "str(jax.typeof(w))", "jnp.isnan(w)", "jnp.sum(w)", "jnp.mean(w,axis=0)",
    "jnp.where(w>2,w,s)", "jnp.stack([s,s])", "jnp.concatenate([w,w])", "jnp.array([s,2.])", "jnp.asarray(w)",
    "jnp.asarray(w,jnp.int32)", "jnp.einsum('ij,kj->ik',w,w)", "jnp.linalg.norm(w)", "jax.nn.relu(w)",
    "jax.nn.softmax(w)", "jax.lax.add(w,w)", "jax.lax.dot(w,w.T)", "jnp.allclose(w,w)", "jnp.array_equal(w,w)",
    "jnp.argmax(w)", "jnp.maximum(s,n)", "jax.tree.reduce(operator.add,{'a':s,'b':s})",
    "jax.tree.map(lambda a,b:a-b,{'a':w},{'a':w})", "jax.jit(lambda x:x*2)(w)",
    "jax.jit(lambda t:t['a']+t['b'])({'a':w,'b':s})", "jax.jit(lambda x:x*w)(2.)",
    "jax.grad(lambda x:(x**2).sum())(w)", "jax.value_and_grad(lambda x:(x**2).sum())(w)", "jax.vmap(lambda x:x*2)(w)",
    "jax.jvp(lambda x:x*2,(w,),(w,))", "jax.vjp(lambda x:x*x,w)[1](w)", "jax.lax.scan(lambda c,x:(c+x.sum(),x),s,w)",
    "jax.lax.cond(f,lambda x:x*2,lambda x:x,w)", "jax.lax.while_loop(lambda c:c<50,lambda c:c*2,s)",
    "jax.hessian(lambda x:(x**3).sum())(v)", "jax.linearize(lambda x:x*x,v)[1](v)", "jax.jacfwd(lambda x:x*x)(v)",
    "jax.checkpoint(lambda x:x*2)(w)", "jax.device_put(w)", "jax.device_put(w,jax.devices()[0])",
    "jax.device_get({'w':w,'s':s})", "jax.block_until_ready(w)", "jax.jit(lambda x:x*2).lower(w).compile()(w)",
    "str(jax.make_jaxpr(lambda x:x*2)(w))",
    "jax.pure_callback(lambda x:np.asarray(x),jax.ShapeDtypeStruct((3,4),jnp.float32),w)", "jnp.zeros_like(w)",
    "jnp.ones_like(s)", "jnp.full_like(w,3)", "jnp.empty_like(w).shape", "jax.eval_shape(lambda x:x@x.T,w)",
    "optax.adam(.1).init({'w':w})", "optax.sgd(.1,momentum=.9).init(w)",
    "TrainState.create(apply_fn=None,params={'w':w},tx=optax.adam(.1)).opt_state",
    "optax.apply_updates({'w':w},{'w':w})", "optax.global_norm({'w':w})", "jnp.result_type(w,n)",
    "jnp.promote_types(w.dtype,n.dtype)", "jax.ShapeDtypeStruct(w.shape,w.dtype,sharding=w.sharding).shape",
    "jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape,x.dtype),w)", "jax.tree.map(jnp.zeros_like,{'a':w})",
    "optax.incremental_update({'w':w},{'w':w},.1)", "jnp.issubdtype(w.dtype,jnp.floating)", "jnp.iscomplexobj(c)",
    "jnp.broadcast_to(s,(3,))", "jnp.broadcast_shapes(w.shape,v.shape)", "jax.lax.fori_loop(0,n,lambda i,x:x+i,s)",
    "jax.lax.switch(n,[lambda x:x,lambda x:x*2,lambda x:x*3,lambda x:x*4],w)", "(wk+np.float16(1)).dtype",
    "(wkv*jnp.ones(3,jnp.bfloat16)).dtype",
)
KEYS = (
    "jax.random.split(k)", "jax.random.normal(k,(3,))", "jax.random.fold_in(k,1)", "jax.random.key_data(k)",
    "str(jax.random.key_impl(k))", "ks[0]", "ks[1:]", "list(ks)", "[*ks]", "ks==ks", "k!=k", "k+1", "k<k", "bool(k)",
    "float(k)", "hash(k)", "len(ks)", "len(k)", "ks.reshape(3,1)", "ks.T", "copy.copy(k)", "copy.deepcopy(k)",
    "(ks.shape,ks.ndim,ks.size,str(ks.dtype),ks.nbytes,ks.itemsize)", "jnp.issubdtype(k.dtype,jax.dtypes.prng_key)",
    "jax.jit(lambda k:jax.random.normal(k))(k)", "jax.vmap(lambda k:jax.random.normal(k))(ks)",
    "jax.vmap(jax.random.split)(ks)", "jnp.stack([k,k])", "jnp.where(True,k,k)", "jax.device_get(ks)",
    "jax.device_put(ks)", "jnp.zeros_like(ks)", "jax.lax.scan(lambda c,k:(c+jax.random.normal(k),None),0.,ks)",
    "jax.eval_shape(jax.random.split,k)", "jax.random.bits(k)", "jax.random.permutation(k,5)",
    "jax.random.permutation(k,v)", "jax.random.randint(k,(3,),0,n+3)", "jax.random.choice(k,v)",
    "jax.random.clone(k)", "jax.random.wrap_key_data(jax.random.key_data(k))", "ks.ravel()", "jnp.take(ks,0)",
    "jnp.concatenate([ks,ks])", "ks.sum()",
    "jax.lax.while_loop(lambda c:c[1]<3,lambda c:(jax.random.fold_in(c[0],1),c[1]+1),(k,0))[0]", "ks.at[0].set(k)",
    "jax.random.normal(raw,(2,))", "jax.random.split(raw)",
)
# fmt: on


def added_in_place(a: Any, b: Any) -> Any:
    a += b
    return a


def multiplied_in_place(a: Any, b: Any) -> Any:
    a *= b
    return a


def values() -> dict[str, jax.Array]:
    return {
        "s": jnp.float32(2.75) + 0,
        "q": jnp.float32(jnp.nan),
        "n": jnp.int32(3),
        "f": jnp.array(True),
        "one": jnp.ones((1, 1)),
        "w": jnp.arange(12.0).reshape(3, 4) / 3,
        "v": jnp.arange(5.0),
        "c": jnp.array(1 + 2j),
        "bf": jnp.arange(3.0).astype(jnp.bfloat16),
        "i8": jnp.arange(3, dtype=jnp.int8),
        "u32": jnp.arange(3, dtype=jnp.uint32),
        "fp8": jnp.arange(3.0).astype(jnp.float8_e4m3fn),
        "wk": jnp.asarray(2.5),
        "wkv": jnp.broadcast_to(jnp.asarray(2.5), (3,)),
        "k": jax.random.key(0),
        "ks": jax.random.split(jax.random.key(1), 3),
        "raw": jax.random.PRNGKey(0),
    }


@pytest.fixture(scope="module")
def arrays() -> dict[str, Any]:
    return jax.jit(values)()


@pytest.fixture(scope="module")
def handles(session: sw.Session) -> dict[str, Any]:
    return session.parallelize(values)()


def facts(value: Any) -> Any:
    """What two results must have in common."""
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return "key", str(value.dtype), np.asarray(jax.random.key_data(value)).tolist()
    if isinstance(value, jax.Array):
        return "array", str(value.dtype), value.weak_type, repr(np.asarray(value).astype(complex).tolist())
    if isinstance(value, np.ndarray):
        return "numpy", str(value.dtype), repr(value.astype(complex).tolist())
    return type(value).__name__, repr(value)


def outcome(expression: str, names: dict[str, Any]) -> Any:
    try:
        return jax.tree.map(facts, eval(expression, {**globals(), **names}))
    except Exception as error:
        return type(error).__name__


@pytest.mark.dear
@pytest.mark.filterwarnings("ignore")  # what numpy and JAX warn of, they warn of for both
@pytest.mark.parametrize("expressions", [PYTHON, NUMPY, JAX, KEYS], ids=["python", "numpy", "jax", "keys"])
def test_it_gives_what_a_jax_array_gives(handles: Any, arrays: Any, expressions: tuple[str, ...]) -> None:
    def check(expression: str) -> None:
        assert outcome(expression, handles) == outcome(expression, arrays)

    assert list_failing_rows(check, zip(expressions)) == []


def test_shape_and_type_read_nothing(session: sw.Session) -> None:
    """An initializer that waits to be run has not run afterwards."""
    step = session.parallelize(lambda params: params["w"].sum())
    params = step.init(lambda: {"w": jnp.ones((4, 3)), "k": jax.random.split(jax.random.key(0), 2)})
    w, k = params["w"], params["k"]
    assert (jnp.shape(w), np.ndim(w), len(w), w.nbytes, w.aval.shape, w.weak_type) == ((4, 3), 2, 4, 48, (4, 3), False)
    assert jnp.result_type(w, jnp.bfloat16) == jnp.float32
    zeros = [jnp.zeros_like(w), jnp.ones_like(w), jnp.full_like(w, 2), *jax.tree.leaves(optax.adam(0.1).init({"w": w}))]
    assert all(type(each) is type(jnp.ones(())) for each in zeros)
    assert jnp.zeros_like(k).dtype == k.dtype
    assert TrainState.create(apply_fn=None, params={"w": w}, tx=optax.sgd(0.1, momentum=0.9)).step == 0
    assert jax.eval_shape(lambda w, k: (w @ w.T, jax.random.split(k[0])), w, k)[0].shape == (4, 4)
    assert jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)["w"].dtype == jnp.float32
    assert isinstance(w, jax.Array)
    assert not w.is_ready()
    assert not k.is_ready()
    assert w.sharding == "not placed yet"
    assert float(w.sum()) == 12
    assert w.is_ready()


def test_a_large_read_by_an_operator_warns_once_a_kind_and_an_explicit_one_never(session: sw.Session) -> None:
    big = session.parallelize(lambda: (jnp.ones((17, 1 << 20)),))()[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.asarray(big)
        big.to_jax()
        jax.device_get(big)
        jnp.zeros_like(big)
        len(big)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        results = [(big + 1)[0, 0], (big + 1)[0, 0], jnp.max(big), jnp.min(big)]
    assert [float(each) for each in results] == [2, 2, 1, 1]
    assert [(each.category, each.filename) for each in warned] == [(LargeFetchWarning, __file__)] * 2
    assert [str(each.message).split(" reads 71 MB")[0] for each in warned] == ["add", "a function of JAX"]
    assert all("session.parallelize(tx.init)" in str(each.message) for each in warned)


def test_deleting_frees_and_a_deleted_handle_can_be_shown(session: sw.Session) -> None:
    (handle,) = session.parallelize(lambda: (jnp.ones(3),))()
    assert not handle.is_deleted()
    handle.delete()
    assert handle.is_deleted()
    assert all("deleted" in text for text in (repr(handle), str(handle), f"{handle}"))
    with pytest.raises(sw.ArrayError, match="deleted"):
        _ = handle + 1


# ---- closed over ---------------------------------------------------------------------

CLOSURES = {
    "operators": lambda t, x: x + t["w"] * t["s"] - (t["w"] @ x.T).sum() + 2 ** t["s"] + round(t["s"]),
    "methods": lambda t, x: x * t["w"].sum() + t["w"].T.mean() + t["w"][0] + t["w"].at[0].set(1.0) + t["w"].ravel()[2],
    "iteration": lambda t, x: sum(row for row in t["w"]) + x[0],
    "numpy": lambda t, x: np.sum(t["w"]) + x,
    "lax": lambda t, x: jax.lax.dot(t["w"], x.T),
    "jnp": lambda t, x: (
        jnp.einsum("ij,kj->ik", t["w"], x) + jnp.stack([t["s"], t["s"]]).sum() + jnp.array(t["w"])[0, 0]
    ),
    "returned": lambda t, x: (t["w"], {"s": t["s"]}, x),
    "jit": lambda t, x: jax.jit(lambda y: y * t["w"])(x) + jax.jit(lambda a, b: a * b)(t["w"], x),
    "scan": lambda t, x: jax.lax.scan(lambda c, r: (c + r * t["s"], c.sum()), x[0], t["w"]),
    "carry": lambda t, x: jax.lax.fori_loop(0, 3, lambda i, c: c + x[i], t["w"]),
    "while": lambda t, x: jax.lax.while_loop(lambda c: c.sum() < t["s"] * 100, lambda c: c + t["w"] + 1, x),
    "cond": lambda t, x: jax.lax.cond(t["f"], lambda y: y * t["w"], lambda y: y, x),
    "grad of it": lambda t, x: jax.grad(lambda p: (p["w"] * x).sum() * p["s"])({"w": t["w"], "s": t["s"]}),
    "grad past it": lambda t, x: jax.grad(lambda y: jax.checkpoint(lambda z: jnp.tanh(z * t["w"]))(y).sum())(x),
    "vmap": lambda t, x: jax.vmap(lambda r, s: r * s + t["s"])(x, t["w"]),
    "keys": lambda t, x: x + jax.random.normal(t["k"], x.shape) + jax.random.uniform(jax.random.split(t["k"])[0]),
    "custom gradients": lambda t, x: jax.nn.relu(t["w"] * x) + jax.nn.softmax(t["w"]),
}


@pytest.mark.dear
def test_a_handle_that_a_step_closes_over_is_an_argument(session: sw.Session, handles: Any, arrays: Any) -> None:
    x = np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4)

    def check(_: str, function: Any) -> None:
        step = session.parallelize(lambda x: function(handles, x))
        expected = jax.tree.leaves(jax.jit(lambda x: function(arrays, x))(x))
        for ours, theirs in zip(jax.tree.leaves(step(x)), expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)  # 1 - tanh² next to 0
        names = step.lower(x).argument_names
        assert names[0] == "x"
        assert len(names) > 1
        assert all(each.startswith("closed_over[") for each in names[1:])

    assert list_failing_rows(check, CLOSURES.items()) == []


def test_an_initializer_may_close_over_handles(session: sw.Session, handles: Any) -> None:
    step = session.parallelize(lambda x: x)
    state = step.init(lambda scale: jax.tree.map(lambda p: p * scale, {"w": handles["w"]}), np.float32(2))
    np.testing.assert_allclose(state["w"], np.arange(12).reshape(3, 4) / 1.5, rtol=1e-6)


def test_a_step_names_what_it_closed_over_when_that_was_donated(session: sw.Session) -> None:
    state = session.parallelize(lambda: jnp.ones(4))()
    evaluate = session.parallelize(lambda x, scale=1.0: (x + state).sum() * scale)
    assert float(evaluate(np.zeros(4, np.float32), scale=2.0)) == 8
    session.parallelize(lambda state: state + 1, donate_argnums=0)(state)
    with pytest.raises(sw.ArrayError, match=r"closes over an array of shape \[4\] that was donated to(.|\n)*argument"):
        evaluate(np.zeros(4, np.float32), scale=2.0)


def test_one_array_is_not_donated_and_closed_over(session: sw.Session) -> None:
    state = session.parallelize(lambda: jnp.ones(4))()
    step = session.parallelize(lambda x: x + state, donate_argnums=0)
    with pytest.raises(sw.ArrayError, match="closed over"):
        step(state)
    assert float(step(np.zeros(4, np.float32)).sum()) == 4
