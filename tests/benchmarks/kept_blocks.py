"""What torch keeps on a GPU of the blocks that vLLM's sampler makes: `python -m tests.benchmarks.kept_blocks [GIB]`.

Blocks of [requests, vocabulary] in float32, as many as a sampler has at once, while the requests grow to 1,024, twice.
With GIB, torch may hold no more (verl_plugins/shared_gpu.py sets such a limit). One line of JSON, in GiB.
"""

import json
import sys

import torch

VOCABULARY = 151936  # Qwen2.5's
CACHE_GIB = 11.7  # a KV cache beside them

if __name__ == "__main__":
    limits = [float(word) for word in sys.argv[1:]]
    for limit in limits:
        torch.cuda.set_per_process_memory_fraction(limit * 2**30 / torch.cuda.mem_get_info()[1])
    cache = torch.empty(int(CACHE_GIB * 2**30), dtype=torch.uint8, device="cuda")
    growing, falling = list(range(50, 1025, 50)), [1024 - i % 40 for i in range(200)]
    for requests in growing * 2 + falling + list(range(1, 1025, 25)):
        logits = torch.empty(requests, VOCABULARY, device="cuda").normal_()
        logprobs, probs = logits.log_softmax(-1), logits.softmax(-1)
        noise = torch.empty_like(probs).exponential_()
        chosen = probs.div_(noise).argmax(-1)
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), torch.cuda.memory_reserved()
    names = "most_allocated", "most_kept", "kept_at_the_end"
    found = {name: round(value / 2**30, 1) for name, value in zip(names, peaks, strict=True)}
    print(json.dumps({"limit": limits[0] if limits else None, **found}))
