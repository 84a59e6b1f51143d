"""A certificate is given for what can be compared, and for nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rar_lib.errors import TraceError
from rar_lib.metrics.agreement import agreement
from rar_lib.traces.certificate import Certificate, align, certify
from rar_lib.traces.compare import compare
from rar_lib.traces.numbering import co_assignment, infer_numbering
from rar_lib.traces.trace import RouteTrace
from tests.traces.writers import make_batch

E, K = 16, 4


def pair(flips: float = 0.03, seed: int = 0, versions: tuple[int, int] = (1, 1)) -> tuple[RouteTrace, RouteTrace]:
    """Two records of the same tokens whose sets differ in a share of the cells."""
    batch = make_batch(E, K, 4, (1, 2, 3), [(20, 30)] * 20, seed)
    a = replace(batch.trace(), policy_version=np.full(1000, versions[0]))
    rng = np.random.default_rng(seed)
    ids = a.ids()
    other = np.argsort(rng.random((*ids.shape[:2], E)), -1)[..., :K]
    ids = np.where((rng.random(ids.shape[:2]) < flips)[..., None], other, ids)
    header = a.header.model_copy(update={"producer": "trainer", "source": "old"})
    b = RouteTrace.from_packed(
        header, ids, a.lengths, a.status, token_ids=a.token_ids, policy_version=np.full(1000, versions[1])
    )
    return a, b


def states(certificate: Certificate) -> dict[str, str]:
    return {check.name: check.state for check in certificate.checks}


def renumbered(trace: RouteTrace, mapping: np.ndarray, layer: int | None = None) -> RouteTrace:
    ids = trace.ids()
    which = slice(None) if layer is None else slice(layer, layer + 1)
    ids[:, which] = np.where(ids[:, which] >= 0, mapping[ids[:, which]], -1)
    return RouteTrace.from_packed(
        trace.header, ids, trace.lengths, trace.status, token_ids=trace.token_ids, policy_version=trace.policy_version
    )


def test_a_sound_pair_is_certified() -> None:
    a, b = pair()
    certificate = certify(a, b, "mismatch")
    assert certificate.valid
    assert set(states(certificate).values()) == {"proven"}
    certificate.require()
    assert [n.moved for n in certificate.numbering] == [()] * 3
    assert certificate.table().shape == (6, 3)
    assert "valid" in str(certificate)
    assert certificate._repr_html_() == certify(a, b, "mismatch")._repr_html_()


def test_co_assignment_by_hand() -> None:
    ids_a, ids_b = np.array([[0, 1], [0, 2]]), np.array([[0, 1], [1, 2]])
    both = co_assignment(ids_a, ids_b, 3)
    # token 0: (0,0) (0,1) (1,0) (1,1); token 1: (0,1) (0,2) (2,1) (2,2)
    assert both.tolist() == [[1, 2, 1], [1, 1, 0], [0, 1, 1]]


def test_another_numbering_is_found_and_refused() -> None:
    a, b = pair()
    mapping = np.random.default_rng(3).permutation(E)
    b = renumbered(b, mapping, layer=1)
    certificate = certify(a, b, "mismatch")
    assert states(certificate)["numbering"] == "failed"
    assert np.array_equal(certificate.numbering[1].mapping, mapping)
    assert certificate.numbering[1].matched > 0.95 > certificate.numbering[1].overlap
    assert certificate.numbering[0].moved == ()
    with pytest.raises(TraceError, match="numbering failed"):
        certificate.require()
    assert not certify(a, b, "mismatch", asserting=("numbering",)).valid  # what failed cannot be vouched for


def test_ambiguity_is_reported() -> None:
    a, _ = pair(0)
    only = a.ids()
    only[(only == 4) | (only == 5)] = -1  # cells that use 4 or 5 lose them, so they are never seen
    known = (only >= 0).all(-1)
    status = np.where(known, a.recorded, 0) + np.where(~a.recorded & (a.status == 2)[:, None], 2, 0)
    left = RouteTrace.from_packed(
        a.header, np.where(known[..., None], only, -1), a.lengths, status, token_ids=a.token_ids
    )
    numbering = infer_numbering(left, left)
    assert all({4, 5} <= set(n.ambiguous) for n in numbering)
    assert all(n.moved == () for n in numbering)
    # two experts that are always chosen together: swapping them costs nothing
    batch = a.ids().copy()
    together = np.sort(np.argsort(np.random.default_rng(0).random((1000, 3, 7)), -1)[..., :2], -1)
    batch = np.concatenate([together * 2, together * 2 + 1], -1)
    twins = RouteTrace.from_packed(
        a.header, np.where(a.recorded[..., None], batch, -1), a.lengths, a.status, token_ids=a.token_ids
    )
    assert all(set(range(14)) <= set(n.ambiguous) for n in infer_numbering(twins, twins))
    assert all(
        np.array_equal(n.mapping, np.arange(E)) for n in infer_numbering(twins, twins[::-1].select(range(19, -1, -1)))
    )
    check = next(c for c in certify(twins, twins, "mismatch").checks if c.name == "numbering")
    assert check.state == "unproven"
    assert "48 of 48 experts cannot be told apart" in check.seen  # 14 twins and 2 unused in each layer


def test_other_tokens_lengths_orders_and_layers() -> None:
    a, b = pair()
    assert b.token_ids is not None
    ids = b.token_ids.copy()
    ids[123] += 1
    check = certify(a, replace(b, token_ids=ids), "mismatch").checks[0]
    assert check.state == "failed"
    assert "sequence 2, token 23" in check.seen
    assert states(certify(a, replace(b, token_ids=None), "mismatch"))["tokens"] == "unproven"
    assert certify(a, replace(b, token_ids=None), "mismatch", asserting=("tokens",)).valid
    assert states(certify(a, b[:5], "mismatch"))["tokens"] == "failed"
    order = np.random.default_rng(0).permutation(20)
    moved = b.select(order)
    assert states(certify(a, moved, "mismatch"))["tokens"] == "failed"
    assert align(a, moved).equals(b)
    header = b.header.model_copy(update={"moe_layers": (0, 1, 2)})
    other = certify(a, replace(b, header=header), "mismatch")
    assert (states(other)["layers"], other.numbering) == ("failed", ())
    with pytest.raises(TraceError, match="sequence 0 of the first record is not in the second"):
        align(a, b.select([1, 2]))


def test_mismatch_and_drift_are_not_one() -> None:
    a, b = pair(versions=(1, 2))
    assert states(certify(a, b, "mismatch"))["weights"] == "failed"
    drift = certify(a, b, "drift")
    assert (states(drift)["weights"], states(drift)["engines"]) == ("proven", "unproven")

    def of_engine(trace: RouteTrace, name: str, **header: object) -> RouteTrace:
        return replace(trace, header=trace.header.model_copy(update={"producer": name, **header}))

    assert states(certify(of_engine(a, "vllm"), of_engine(b, "hf"), "drift"))["engines"] == "failed"
    assert certify(of_engine(a, "vllm"), of_engine(b, "vllm-http", source="new"), "drift").valid
    assert (
        states(certify(of_engine(a, "verl"), of_engine(b, "verl"), "drift"))["engines"] == "unproven"
    )  # whatever sampled for it
    low = of_engine(b, "hf", producer_version="bfloat16")
    assert states(certify(of_engine(a, "hf", producer_version="float32"), low, "drift"))["engines"] == "unproven"
    same, again = pair(versions=(1, 1))
    assert states(certify(same, again, "drift"))["weights"] == "failed"
    partly = replace(b, policy_version=np.r_[np.full(999, 2), 1])
    assert states(certify(a, partly, "drift"))["weights"] == "failed"
    unknown = replace(b, policy_version=None)
    assert states(certify(a, unknown, "mismatch"))["weights"] == "unproven"
    with pytest.raises(TraceError, match=r"weights unproven .* asserting"):
        certify(a, unknown, "mismatch").require()
    assert states(certify(a, unknown, "mismatch", asserting=("weights",)))["weights"] == "asserted"
    with pytest.raises(TraceError, match="kind: expected one of mismatch, drift"):
        certify(a, b, "noise")  # type: ignore[arg-type]
    with pytest.raises(TraceError, match="asserting: expected some of"):
        certify(a, b, "mismatch", asserting=("layers",))


def test_unrelated_records_prove_no_numbering() -> None:
    a, b = pair(flips=1.0)
    assert states(certify(a, b, "mismatch"))["numbering"] == "unproven"


def test_numbers_only_under_a_certificate() -> None:
    a, b = pair()
    found = compare(a, b)
    assert found.scalars() == agreement(a, b).scalars()
    assert found.table is not None
    assert found.table["layer"].tolist() == [1, 2, 3]
    assert (found.table["tv"] <= 1 - found.table["overlap"] + 1e-12).all()
    assert found.verdicts == ()
    refused = compare(a, replace(b, policy_version=None))
    assert (refused.agreement, refused.table, refused.scalars()) == (None, None, {})
    assert [(v.code, v.severity) for v in refused.verdicts] == [("NOT_COMPARABLE", "warning")]
    failed = compare(a, renumbered(b, np.roll(np.arange(E), 1)))
    assert [(v.code, v.severity) for v in failed.verdicts] == [("NOT_COMPARABLE", "warning")]


def test_a_shift_between_two_records_is_named() -> None:
    a, b = pair(0)
    ids = a.ids()
    rows = ids.copy()
    for start, end in zip(a.offsets[:-1], a.offsets[1:], strict=True):
        rows[start : end - 1] = np.roll(ids[start : end - 1], 1, 0)
    moved = RouteTrace.from_packed(
        b.header, rows, a.lengths, a.status, token_ids=a.token_ids, policy_version=a.policy_version
    )
    found = compare(a, moved)
    assert [v.code for v in found.verdicts] == ["NOT_COMPARABLE", "ROWS_SHIFTED"]
    assert "moved by 1 row" in found.verdicts[1].seen


@pytest.mark.parametrize("pairs", [1, 2, 3])
def test_a_few_permuted_experts_are_enough(pairs: int) -> None:
    batch = make_batch(64, 4, 4, (1, 2, 3), [(20, 30)] * 40)
    a = replace(batch.trace(), policy_version=np.zeros(2000, np.int64))
    mapping = np.arange(64)
    moved = np.arange(2 * pairs)
    mapping[moved] = moved[::-1]
    certificate = certify(a, renumbered(a, mapping), "mismatch")
    assert states(certificate)["numbering"] == "failed"
    assert certificate.numbering[0].moved == tuple(moved)


def test_small_records_do_not_overfit() -> None:
    """A few tokens with real flips prove little, but accuse nobody."""
    for seed in range(40):
        batch = make_batch(E, 2, 24, tuple(range(24)), [(6, 6)], seed)
        a = replace(batch.trace(), policy_version=np.zeros(12, np.int64))
        rng = np.random.default_rng(seed)
        other = np.argsort(rng.random((12, 24, E)), -1)[..., :2]
        ids = np.where((rng.random((12, 24)) < 0.1)[..., None], other, a.ids())
        b = RouteTrace.from_packed(
            a.header, ids, a.lengths, a.status, token_ids=a.token_ids, policy_version=a.policy_version
        )
        assert states(certify(a, b, "mismatch"))["numbering"] != "failed"
    one = make_batch(256, 8, 3, (0, 1, 2), [(1, 1)])
    trace = replace(one.trace(), policy_version=np.zeros(2, np.int64))
    assert states(certify(trace, trace, "mismatch"))["numbering"] == "unproven"


@pytest.mark.parametrize(("e", "k"), [(8, 2), (8, 4), (16, 4), (64, 8), (8, 6)])
def test_a_shift_under_skewed_routers_is_no_certificate(e: int, k: int) -> None:
    rng = np.random.default_rng(e + k)
    prior = rng.normal(size=(3, e)) * 2
    ids = np.argsort(-(prior + rng.gumbel(size=(2000, 3, e))), -1)[..., :k]
    a = make_batch(e, k, 4, (1, 2, 3), [(20, 30)] * 40).trace()

    def made(rows: np.ndarray) -> RouteTrace:
        wide = np.where(a.recorded[..., None], rows, -1)
        return RouteTrace.from_packed(
            a.header, wide, a.lengths, a.status, token_ids=a.token_ids, policy_version=np.zeros(2000, np.int64)
        )

    moved = ids.copy()
    for start, end in zip(a.offsets[:-1], a.offsets[1:], strict=True):
        moved[start : end - 1] = np.roll(ids[start : end - 1], 1, 0)
    assert states(certify(made(ids), made(ids), "mismatch"))["rows"] == "proven"
    assert states(certify(made(ids), made(moved), "mismatch"))["rows"] == "failed"
    found = compare(made(ids), made(moved), asserting=("numbering",))
    assert "ROWS_SHIFTED" in [v.code for v in found.verdicts]
    assert found.agreement is None


def test_weights_that_only_share_a_number() -> None:
    a, b = pair()
    named = replace(b, header=b.header.model_copy(update={"model_id": "other"}))
    first = replace(a, header=a.header.model_copy(update={"model_id": "one"}))
    assert states(certify(first, named, "mismatch"))["weights"] == "unproven"
    unknown = np.full(1000, -1)
    both = (replace(a, policy_version=unknown), replace(b, policy_version=unknown))
    assert states(certify(*both, "mismatch"))["weights"] == "unproven"
    later = replace(b, header=b.header.model_copy(update={"source": "new"}))
    assert states(certify(a, later, "mismatch"))["weights"] == "unproven"
    broken = replace(b, experts=b.experts + 100, _stored_sha256="opened")
    with pytest.raises(TraceError, match="expected ids below 16, found"):
        certify(a, broken, "mismatch")
