"""Requests that come and go on the device, read a step late; greedy ones against transformers, the others a CPU."""

import json

import pairs
import software_acl

import gemma_npu_compile as gnc
from gemma_npu_compile.verify import plain_greedy

NEW = 16
LENGTHS = (9, 40, 3, 25, 14)
SAMPLED = {1: gnc.Sampling(temperature=0.9, top_k=20, top_p=0.9, seed=5), 4: gnc.Sampling(seed=6)}
target, assistant = pairs.build_pair()
given = [each.tolist() for each in pairs.prompts(*LENGTHS)]
expected = [plain_greedy(target, each, NEW, [1], 0) for each in given]


def run(session: gnc.Session, minimum: int = 0) -> list[list[int]]:
    added = [
        session.add(prompt, max_new_tokens=NEW, sampling=SAMPLED.get(i), min_new_tokens=minimum, eos_token_id=[1])
        for i, prompt in enumerate(given)
    ]
    session.drain()
    return [request.tokens for request in added]


with gnc.Session(target, assistant, num_draft_tokens=1, max_rows=3, max_model_len=128, compiled=False) as session:
    drawn, held = run(session), run(session, NEW)
target, assistant = target.to("npu"), assistant.to("npu")
options = {"capture_sizes": [3], "on_fallback": "error"}
session = gnc.Session(
    target, assistant, num_draft_tokens=1, max_rows=3, max_model_len=128, options=options, prefill_chunk=64
)
first = run(session)
software_acl.mark("warm")
steps = len(session.stats.step_seconds)
second = run(session)
software_acl.mark("done")
steps = len(session.stats.step_seconds) - steps
last = run(session, NEW)
greedy = [i for i in range(len(given)) if i not in SAMPLED]
print(
    json.dumps(
        {
            "greedy": all(tokens[i] == expected[i] for tokens in (first, second) for i in greedy),
            "sampled": all(tokens[i] == drawn[i] for tokens in (first, second) for i in SAMPLED),
            "held": last == held,
            "kinds": len(session.engine.report.graphs),
            "captures": [g.captures for g in session.engine.report.graphs],
            "fallbacks": session.engine.report.totals()["fallbacks"],
            "steps": steps,
        }
    )
)
