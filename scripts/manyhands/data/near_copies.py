"""Near-duplicates among documents that are spread over ranks: no rank ever holds the signatures of all of them.

    records_N2 = band_records(mine_eK)                    # (key of a band, document) of this rank's documents
    met_M2 = exchange_rows(parcels)                       # parcels[r]: the records whose keys belong to rank r
    pairs = ...                                           # documents that share a key, found by each rank for its keys
    copies = near_pairs(pairs, mine_eK, similarity, 0.6)  # {this rank's document: the first one that it is near to}

Document i lies on rank i % n, in row i // n of its signatures. Three all-to-alls: keys go to the rank that compares
them, pairs go to the holder of the first document, and that one's signature goes to the holder of the second.
"""

import zlib
from collections.abc import Callable, Iterable

import numpy as np
import torch
import torch.distributed as dist

BANDS = 16


def band_records(mine_eK: np.ndarray, bands: int = BANDS) -> torch.Tensor:
    """Return a row (key, document) for each band of each signature of this rank: int32 [e * bands, 2].

    A key is a hash of 31 bits of the band's number and content. Two documents may share one by accident: it only makes
    a pair to compare.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    records = [
        (zlib.crc32(part.tobytes(), band) >> 1, rank + n * row)
        for row, signature_K in enumerate(mine_eK)
        for band, part in enumerate(np.split(signature_K, bands))
    ]
    return torch.tensor(records, dtype=torch.int32).view(-1, 2)


def exchange_rows(parcels: list[torch.Tensor]) -> torch.Tensor:
    """Send parcels[r] to rank r and return the rows that arrive, those of rank 0 first. All ranks call it."""
    leaving = torch.tensor([len(parcel) for parcel in parcels], device=parcels[0].device)
    arriving = torch.empty_like(leaving)
    dist.all_to_all_single(arriving, leaving)
    rows = parcels[0].new_empty((int(arriving.sum()), *parcels[0].shape[1:]))
    dist.all_to_all_single(rows, torch.cat(parcels), arriving.tolist(), leaving.tolist())
    return rows


def near_pairs(
    pairs: Iterable[tuple[int, int]],
    mine_eK: np.ndarray,
    similarity: Callable[[np.ndarray, np.ndarray], float],
    limit: float,
    device: torch.device | str = "cpu",
) -> dict[int, int]:
    """Return {document of this rank: the first earlier one whose signature is as similar as `limit`}.

    pairs: (first, second) with first < second, those that this rank found. All ranks call it.
    """
    n = dist.get_world_size()
    mine_eK = torch.from_numpy(mine_eK).to(device)
    asked_P2 = torch.tensor(sorted(set(pairs)), dtype=torch.int32, device=device).view(-1, 2)
    asked_P2 = exchange_rows([asked_P2[asked_P2[:, 0] % n == r] for r in range(n)])
    asked_P2 = torch.unique(asked_P2, dim=0)  # several ranks may have found a pair, each by another band
    sent = torch.cat([asked_P2, mine_eK[(asked_P2[:, 0] // n).long()]], dim=1)
    arrived = exchange_rows([sent[asked_P2[:, 1] % n == r] for r in range(n)]).cpu().numpy()
    first_of: dict[int, int] = {}
    for first, second, *first_K in sorted(arrived.tolist()):
        if second not in first_of and similarity(np.array(first_K), mine_eK[second // n].cpu().numpy()) >= limit:
            first_of[second] = first
    return first_of
