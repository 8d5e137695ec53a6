"""Stock vLLM with preemption inside a step, by vLLM's own extension points; no file of vLLM is edited.

| file | holds |
| --- | --- |
| `supported.py`, `refusals.py` | the vLLM that is supported, and the configurations that are refused |
| `scheduler.py` | vLLM's scheduler, asked for one batch of chosen requests; blocks enter the prefix cache at completion |
| `accounting.py` | vLLM's KV blocks as our scheduler sees them |
| `executor.py`, `worker.py` | the executor and worker classes that vLLM is told to use |
| `points.py`, `compiled_point.py`, `stint.py`, `exclusive.py`, `contexts.py` | where a forward can pause, how it does, and what is swapped meanwhile |
| `tiles.py`, `tiled_rows.py`, `tiled_attention.py` | long operators in pieces, with points between |
| `slots.py` | model runners with private buffers, one for each forward in flight |
| `steps.py` | a vLLM step as a task of the execution pool |

What decides lives in `flowprefill.scheduling`; the loop that joins both is `flowprefill.server.vllm`.
"""
