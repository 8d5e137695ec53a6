"""Pods of the vLLM engine: a parent process that the rest of the service talks to, and stock `vllm serve` as its child.

| file | process | holds |
| --- | --- | --- |
| `pod.py` | parent | a pod from start to stop |
| `preparing.py` | parent | the installed vLLM, the model, sizes, private files |
| `flags.py`, `refused_flags.py`, `environment.py` | parent | the child's command line and environment (pure) |
| `child.py`, `keeper.py` | parent | the child as a process that never outlives its parent |
| `watch.py`, `probing.py` | parent | the child while it starts, serves and drains, as its API port shows it |
| `observer.py` | parent | metrics, state and history from what the engine core tells |
| `by_hand.py` | parent | the two documents of a pod that is started without files |
| `channel.py`, `listening_end.py` | both | how core and parent talk |
| the others | engine core | our scheduler inside vLLM's loop |
"""
