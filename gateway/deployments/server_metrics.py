"""What servers of models tell of themselves at `/metrics`, by the names of each kind and version.

Source of the format: Prometheus, "Exposition formats" (text). Pure. Invariant: a text of an unknown
server gives None, and never a guess.
"""

import re
from collections.abc import Iterable

from policies.replicas import Reading

# By the fields of `Reading`, the names that a server may have for it; a sum over all their labels, or
# the largest where they are shares.
_NAMES = {
    # vLLM: docs.vllm.ai/en/stable/usage/metrics, and of earlier versions gpu_cache_usage_perc and
    # gpu_prefix_cache_hits (docs.vllm.ai/en/v0.5.5/serving/metrics.html); the model server protocol of
    # the Gateway API Inference Extension (docs/proposals/003) names the labels of its memory. SGLang:
    # docs.sglang.io/references/production_metrics.html. Sameway: docs/metrics.md.
    "running": ("vllm:num_requests_running", "sglang:num_running_reqs", "sameway_deployment_running_requests"),
    "waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "sameway_deployment_waiting_requests"),
    "kv_used": (
        *("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        *("sglang:token_usage", "sameway_engine_kv_used_ratio"),
    ),
    "kv_tokens": ("sglang:max_total_num_tokens",),
    "prompt_tokens": ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total", "sameway_tokens_total"),
    "hit_tokens": (
        *("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
        "sglang:cached_tokens_total",
    ),
}
_FIELDS = {name: field for field, names in _NAMES.items() for name in names}
_LINE = re.compile(rf"^({'|'.join(map(re.escape, _FIELDS))}|vllm:cache_config_info)(?:\{{(.*)\}})? (\S+)", re.M)
_SIZES = re.compile(r'\b(block_size|num_gpu_blocks)="(\d+)"')


def reading_of(text: str) -> Reading | None:
    """What a server's metrics say; None where they do not say how many requests run."""
    sums: dict[str, float] = {}
    for name, labels, value in _samples(text):
        if name not in _FIELDS:  # vLLM's memory is in labels
            sizes = dict(_SIZES.findall(labels))
            sums["kv_tokens"] = sums.get("kv_tokens", 0.0) + int(sizes.get("block_size", 0)) * int(
                sizes.get("num_gpu_blocks", 0)
            )
        elif (field := _FIELDS[name]) == "kv_used":
            sums[field] = max(sums.get(field, 0.0), value)
        else:
            sums[field] = sums.get(field, 0.0) + value
    return Reading(**sums) if "running" in sums else None


def _samples(text: str) -> Iterable[tuple[str, str, float]]:
    for name, labels, value in _LINE.findall(text):
        try:
            number = float(value)
        except ValueError:
            continue
        if 0.0 <= number < float("inf"):
            yield name, labels, number
