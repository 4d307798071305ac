"""The checks of lesson 02 accept the lesson's solutions and reject real mistakes with a sentence that names each."""

import contextlib
import io

import pytest
import torch
import torch.distributed as dist
from definitions import taken_from
from exercises import AnswersOfRanks, edited, own_answers
from manyhands.checks import collectives


def receives_while_it_sends(mine):  # right: a blocking call after one that does not block
    rank, n = dist.get_rank(), dist.get_world_size()
    theirs = torch.empty_like(mine)
    work = dist.irecv(theirs, (rank - 1) % n)
    dist.send(mine, (rank + 1) % n)
    work.wait()
    return theirs


def takes_turns_by_barriers(mine):
    rank, n = dist.get_rank(), dist.get_world_size()
    theirs = torch.empty_like(mine)
    for turn in range(n):
        if rank == turn:
            dist.send(mine, (rank + 1) % n)
        if rank == (turn + 1) % n:
            dist.recv(theirs, turn)
        dist.barrier()
    return theirs


def meets_at_the_end(mine):  # right: one barrier parts no messages
    theirs = receives_while_it_sends(mine)
    dist.barrier()
    return theirs


INTO_A_COPY = (
    "exchange(give, right, take, left)",
    "arrived = take.clone()\n        exchange(give, right, arrived, left)",
)
HOP = "exchange(give, right, take, left)"
SHARE = "points // world_size + (rank < points % world_size)"
AN_EXTRA_CALL = "\n    dist.all_reduce(torch.ones(1))"
REJECTED = {
    "ring_reduce_scatter": [
        ("mine += arrived", "give += arrived",
         "holds numbers of rank 3's chunk 3: add chunks of the same number"),
        ("mine += arrived", "mine.copy_(arrived)",
         "chunk 1 holds the numbers of rank 1, and yours are gone: add what arrives to them"),
        ("rank - hop", "rank - 1 - hop",
         "chunk 0 is finished here, not chunk 1: at the first hop send chunk 0"),
        ("mine += arrived", "chunks[(rank - hop - 1) % world_size] = mine + arrived",
         "chunks[1] is another tensor now, no view of the gradient: write into the chunk itself"),
        ("mine += arrived", "mine = mine + arrived",
         "Your chunks have not changed: `mine += arrived` writes into the chunk"),
        ("rank - hop", "rank + hop", "+ hop - 1", "+ hop + 1", "right, arrived, left", "left, arrived, right",
         "this rank sent to rank 3; on the ring it sends only to its right, rank 1"),
        ("mine += arrived", "mine += 2 * arrived", "chunk 1 holds rank 1's numbers 8 times; once each is the sum"),
        ("torch.empty_like(mine)", "torch.stack(chunks)", "(give, ", "(torch.stack(chunks), ",
         "+= arrived", "+= arrived[(rank - hop - 1) % world_size]",
         "the largest message has 64 numbers; chunks of at most 16 are enough"),
        ("torch.empty_like(mine)", "torch.empty_like(mine).float()", "give, right", "give.float(), right",
         "times: keep the dtype all the way"),
        ("mine += arrived", f"mine += arrived{AN_EXTRA_CALL}", "all chunks are right, but it calls all_reduce; build"),
        ("mine += arrived", "mine += arrived\n    exchange(mine.clone(), right, arrived, left)",
         "the messages that this rank sends, n-1 on 4 ranks, should be 3, not 4"),
    ],
    "ring_all_gather": [
        ("(rank - hop)", "(rank - hop - 1)", "rank + 1 - hop", "rank - hop", "holds an unfinished sum of rank"),
        ("rank - hop", "rank - hop - 1", "receive it into that chunk"),
        (*INTO_A_COPY, "arrived, left)", "arrived, left)\n        take += arrived", "in this half, copy and do not"),
        ("world_size - 1", "world_size - 2",
         "chunk 2 still holds this rank's unfinished sum: a finished one must arrive there"),
        (HOP, HOP + AN_EXTRA_CALL, "all chunks are right, but it calls all_reduce; build it from messages"),
        (*INTO_A_COPY, "arrived, left)", "arrived, left)\n        chunks[(rank - hop) % world_size] = arrived",
         "chunks[0] is another tensor now"),
    ],
    "ring_seconds": [
        ("n_bytes / n / beta", "n_bytes / beta",
         "should be 0.00126 seconds, not 0.00486 seconds: a hop carries one chunk, not the whole tensor"),
        ("2 * (n - 1)", "n - 1", "should be 0.00126 seconds, not 0.00063 seconds: that is one of the two halves"),
        ("hops * (alpha + n_bytes / n / beta)", "alpha + hops * n_bytes / n / beta", "every hop pays alpha"),
        ("hops * (alpha + n_bytes / n / beta)", "hops * alpha + n_bytes / n / beta", "every hop carries a chunk"),
        ("hops * (alpha", "(alpha", "that is one hop, and a ring has 2(n-1)"),
        ("2 * (n - 1)", "2 * n", "each half has n-1 hops, not n"),
        ("/ beta", "* beta", "beta is bytes per second, so divide by it"),
        ("alpha + ", "", "the bytes are right, and alpha is missing"),
        ("return hops", "return 1e3 * hops", "not 1.26 seconds: that is in milliseconds"),
        ("2 * (n - 1)", "6", "for 40,000,000 bytes on 100 ranks"),
    ],
    "all_reduce_any_length": [
        ("ring_all_gather(chunks)", "ring_all_gather(chunks)\n    exchange(x_N.clone(), right, x_N.clone(), left)",
         "the messages that this rank sends, 2(n-1) on 4 ranks, should be 6, not 7"),
        ("ring_reduce_scatter(chunks)\n    ring_all_gather(chunks)", "dist.all_reduce(x_N)",
         "it calls all_reduce; build it from messages"),
        ("    ring_all_gather(chunks)\n", "", "for 8 numbers (float64) the sum is wrong"),
        ("tensor_split", "chunk", "IndexError"),
        ("chunks = list(x_N", "x_N = x_N.clone()\n    chunks = list(x_N",
         "x_N still holds other numbers; sum in place"),
        ("chunks = list(x_N", "whole_N, x_N = x_N, x_N.float()\n    chunks = list(x_N", "return x_N",
         "return whole_N.copy_(x_N)", "for 8 numbers (float64) the sum is wrong"),
        ("return x_N", "return x_N.copy_(torch.arange(len(x_N)) * (world_size * (world_size + 1) // 2))",
         "for 8 numbers (float64) the sum is wrong"),
        ("return x_N", "return x_N.float()",
         "for 8 numbers (float64) the sum should be float64, as what you were given, not float32"),
        ("chunks = list(x_N", "chunks = list(x_N[: len(x_N) // world_size * world_size]",
         "for 7 numbers (float64) the sum is wrong: element [4] should be"),
        ("tensor_split(world_size)", "split([len(x_N) // 4] * 3 + [len(x_N) - len(x_N) // 4 * 3])",
         "the largest message has 4 numbers; chunks of at most 2 are enough"),
    ],
    "mended_ring": [
        ("torch.empty_like(chunks[0])", "x_N.clone()",
         "(chunks[(rank - hop) % world_size], right, arrived", "(x_N, right, arrived", "add_(arrived)",
         "add_(arrived.chunk(world_size)[(rank - hop - 1) % world_size])",
         "the largest message has 4 numbers; chunks of at most 1 are enough"),
        ("chunks = list(x_N", "whole_N, x_N = x_N, x_N.float()\n    chunks = list(x_N", "return x_N",
         "return whole_N.copy_(x_N)", "the sum is wrong"),
        ("world_size - 1", "world_size", "2(n-1) on 4 ranks, should be 6"),
        ("[(rank - hop - 1) % world_size].add_", "[(rank - hop) % world_size].add_", "the sum is wrong"),
        ("return x_N", "return x_N.float()", "should be float64, as what you were given, not float32"),
    ],
    "one_hop": [
        ("chunks[left] += arrived", "chunks[rank] += arrived", "holds numbers of rank 3's chunk 3"),
        ("exchange(chunks[rank]", "exchange(chunks[left]",
         "holds numbers of rank 3's chunk 2: add chunks of the same number"),
        ("chunks[left] += arrived", "chunks[left].copy_(arrived)", "chunk 3 should hold the numbers of rank 3"),
        ("chunks[left] += arrived", "chunks[left] += arrived\n    chunks[rank].zero_()", "chunk 0 has changed"),
    ],
    "which_chunks": [
        ("rank - hop)", "rank + hop)", "rank - hop - 1", "rank + hop + 1",
         "that runs the other way round: what arrives comes from the left"),
        (" % world_size, (rank - hop - 1) % world_size", ", rank - hop - 1", "count modulo world_size"),
        ("rank - hop)", "rank)", "rank - hop - 1", "rank - 1", "every hop has another chunk"),
        ("(rank - hop) % world_size, (rank - hop - 1) % world_size",
         "(rank - hop - 1) % world_size, (rank - hop) % world_size", "the first is what leaves"),
    ],
    "pass_right": [
        ("exchange(mine, right, theirs, left)", "dist.send(mine, right); dist.recv(theirs, left)",
         "waited 5 s for a message that never arrived"),
        ("exchange(mine, right, theirs, left)", "exchange(mine, left, theirs, right)", "it is that of rank 1"),
        ("return theirs", "return mine.clone()", ": it is that of rank 0"),
        ("return theirs", "return mine.copy_(theirs)", "mine was changed; leave it as it is"),
    ],
    "pass_in_rounds": [
        (takes_turns_by_barriers, "ranks wait for their turn: 4 messages one after the other, and 2 do"),
        ("rank % 2", "False", "waited 5 s for a message that never arrived"),
        ("rank % 2", "rank", "4 messages one after the other, and 2 do"),
        ("rank % 2", "rank > 1", "right, but ranks wait for their turn: 3 messages one after the other"),
        ("mine, right", "mine, left", "theirs, left", "theirs, right",
         "what comes back should be the tensor of rank 3, your left neighbour: it is that of rank 1"),
        ("dist.recv(theirs, left)", "theirs.fill_(left)", "dist.send", "works.append(dist.isend",
         "mine, right)", "mine, right))", "theirs =", "works = []\n    theirs =", ": this rank received nothing"),
        ("return theirs", "return mine.clone()", ": it is that of rank 0"),
        ("return theirs", "return mine.copy_(theirs)", "mine was changed; leave it as it is"),
        ("mine.clone()", "torch.empty(mine.shape)", "should be int32, as what you were given, not float32"),
        ("if rank % 2:", "everyone = [mine.clone() for _ in range(4)]\n    dist.all_gather(everyone, mine)\n"
         "    theirs = everyone[left]\n    if True:\n        pass\n    elif rank % 2:",
         "(messages, bytes) that you send should be (1, 4), not (0, 0)"),
    ],
    "estimate_pi": [
        (" + (rank < points % world_size)", "", "asked for 1003 points and counted 1000"),
        (SHARE, "points", "asked for 1003 points and counted 4012"),
        (SHARE, "points * (rank == 0)", "rank 0 counts 1003 of 1003 points; share them evenly"),
        ("seed=rank", "seed=0", "equal seeds draw the same points"),
        ("dist.reduce(hits, dst=0)", "dist.all_reduce(hits)", "it calls all_reduce; one reduce to rank 0 is enough"),
        (" if rank == 0 else None", "", "only rank 0 has the sum after a reduce"),
        ("4 * hits", "hits", "with the hits of all ranks what rank 0 returns should be"),
    ],
    "speed_up": [
        ("(seconds[1] / s,", "(s / seconds[1],",
         "with 8.03 s on 1 rank and 4.21 s on 2 the speed-up should be 1.907, not 0.5243: that is upside d"),
        ("/ s / n", "/ s", "the efficiency should be 0.9537, not 1.907: that is the speed-up"),
        ("/ s / n", "/ s / n * 100", "the efficiency should be 1, not 100: that is in percent"),
        ("s in seconds.items()", "s in [*seconds.items()][1:]", "return a dictionary with the keys [1, 2, 4, 8]"),
        ("seconds[1]", "next(iter(seconds.values()))",
         "with 8.0 s on 1 rank and 16.0 s on 2 the speed-up should be 0.5, not 1: one rank is the one wit"),
    ],
}  # fmt: skip
RIGHT = {
    "ring_reduce_scatter": [
        ("mine += arrived", "chunks[(rank - hop - 1) % world_size] += arrived"),  # as the lesson writes it in build B
        ("mine += arrived", "mine[:] = mine + arrived"),
    ],
    "ring_all_gather": [(*INTO_A_COPY, "arrived, left)", "arrived, left)\n        take[:] = arrived")],
    "ring_seconds": [
        lambda b, n, alpha, beta: 2 * (n - 1) * alpha + 2 * (n - 1) / n * b / beta,
        lambda b, n, alpha, beta: torch.tensor([alpha + b / n / beta] * 2 * (n - 1), dtype=torch.float64).sum(),
    ],
    "all_reduce_any_length": [  # the last chunks are smaller, or empty
        ("x_N.tensor_split(world_size)", "[x_N[i * -(-len(x_N) // 4) :][: -(-len(x_N) // 4)] for i in range(4)]"),
    ],
    "mended_ring": [("chunk(", "tensor_split(")],
    "one_hop": [("chunks[left] += arrived", "chunks[left].add_(arrived)")],
    "which_chunks": [lambda hop: [(dist.get_rank() - hop - i) % dist.get_world_size() for i in range(2)]],
    "pass_right": [receives_while_it_sends],
    "pass_in_rounds": [("rank % 2", "rank % 2 == 0"), receives_while_it_sends, meets_at_the_end],
    "estimate_pi": [("4 * hits.item()", "4 * hits"), ("share, seed=rank", "points=share, seed=rank + 3")],
    "speed_up": [lambda seconds: {n: torch.tensor([seconds[1] / s, seconds[1] / s / n]) for n, s in seconds.items()}],
}


class TestAnswers(AnswersOfRanks):
    lesson, checks, world, worlds = "02_collectives", collectives, 4, (1, 3)
    rejected, right, solutions, around = REJECTED, RIGHT, {"speed_up": "scaling"}, ("exchange",)


def _after_the_ring(ranks, edits):
    """What the lesson's own cells make of a ring that build C has accepted: the sums, and the verdict of exercise 1."""
    own = own_answers("02_collectives", {"ring_reduce_scatter": "ring_reduce_scatter"}, ("exchange",), ranks)
    mine = edited(own["ring_reduce_scatter"], *edits)
    build = collectives.ring_reduce_scatter(mine, ranks)
    rank, n = ranks.rank, ranks.world_size
    around = {"rank": rank, "world_size": n, "left": (rank - 1) % n, "right": (rank + 1) % n}
    names = "ring_all_gather", "ring_all_reduce", "all_reduce_any_length"
    lesson = taken_from("02_collectives", "exchange", *names, ring_reduce_scatter=mine, **around)
    assert lesson.ring_all_reduce.__globals__["ring_reduce_scatter"] is mine
    sums = lesson.ring_all_reduce(torch.arange(2.0 * n)).tolist()
    return build, sums, collectives.all_reduce_any_length(lesson.all_reduce_any_length, ranks)


@pytest.mark.parametrize("edits", RIGHT["ring_reduce_scatter"], ids=lambda edits: edits[1])
def test_a_ring_that_build_c_accepts_carries_the_cells_below_it(pool, edits):
    for build, sums, exercise in pool.run(3, _after_the_ring, edits):
        assert (build, sums, exercise) == ("correct", [3.0 * i for i in range(6)], "correct")


# ------------------------------------------------------------------ pictures: names, and what a wrong chunk looks like


def _named(**changes):
    calls = {
        1: lambda x: dist.broadcast(x, src=0),
        2: lambda part, parts: dist.scatter(part, parts, src=0),
        3: lambda x, whole: dist.gather(x, whole, dst=0),
        4: lambda x: dist.reduce(x, dst=0),
        5: lambda x: dist.all_reduce(x),
        6: lambda whole, x: dist.all_gather(whole, x),
        7: lambda part, parts: dist.reduce_scatter(part, parts),
        8: lambda whole, parts: dist.all_to_all_single(whole, parts),
    }
    return calls | {int(name[1:]): call for name, call in changes.items()}


def _printed(ranks, check, *answers):
    """The verdicts on the answers, and what this rank printed."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        verdicts = [getattr(collectives, check)(globals()[answer], ranks) for answer in answers]
    return verdicts, out.getvalue().splitlines()


def right_names():
    return _named()


def swapped_names():
    return _named(
        _1=lambda x: dist.all_reduce(x), _3=None, _5=lambda x: dist.____(x), _7=lambda part, parts: dist.scatter(
            part, parts if dist.get_rank() == 0 else None, src=0
        ),
    )  # fmt: skip


def adds_to_the_wrong_chunk(chunks):
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks[(rank + 1) % n].add_(receives_while_it_sends(chunks[rank]))


@pytest.mark.parametrize("n", [1, 4])
def test_eight_right_names_are_correct_on_any_number_of_ranks(pool, n):
    for (verdicts,), _ in pool.run(n, _printed, "pictures", "right_names"):
        assert set(verdicts.values()) == {"correct"}


def test_each_blank_has_its_own_verdict_and_shows_what_the_ranks_hold_where_that_is_wrong(pool):
    (((verdicts,), printed), *others) = pool.run(4, _printed, "pictures", "swapped_names")
    assert all(not lines for _, lines in others)
    wrong = {number: verdict for number, verdict in verdicts.items() if verdict != "correct"}
    assert wrong[3] == wrong[5] == "not attempted" and wrong.keys() == {1, 3, 5, 7}
    assert wrong[1] == "Rank 0: Picture 1: what this rank holds afterwards should be [3], not [10]."
    assert "        ranks 0 to 3 hold: [10]✗  [10]✗  [10]✗  [10]✗" in printed
    assert "        ranks 0 to 3 hold: [0]✗  [1]✗  [2]✗  [3]✗" in printed


def test_a_rung_draws_the_learners_chunks_with_the_wrong_cells_marked(pool):
    (_, printed), *others = pool.run(3, _printed, "one_hop", "adds_to_the_wrong_chunk")
    assert all(not lines for _, lines in others)
    assert printed[1:] == [
        "        chunk 0 chunk 1 chunk 2", "rank 0: 0       0+?✗    0✗", "rank 1: 1✗      1       1+?✗",
        "rank 2: 2+?✗    2✗      2",
    ]  # fmt: skip
