"""Tensor parallel: one engine core without a model, and a process for each rank that runs the steps.

    engine core                                   rank 0 (the leader)            ranks 1 ... (followers)
    loop ── RankedPool ── Begin ───────────────▶  Member ── TaskPool             Member ── TaskPool
                          Preempt, Resume, ... ▶  leader alone
                          Parked, Ended       ◀─  agrees with the followers by the page where all stop
                          Standing            ◀───────────────────────────────── stands at the agreed place
                          Gathered ────────────▶  all stand
                          LetGo  ◀──────────────  goes on, or unwinds ─────────▶ so do they

| file | holds |
| --- | --- |
| `messages.py`, `link.py` | what is said, and the sockets it goes over |
| `page.py` | the shared page: where all ranks of a step stop, and how far they are |
| `gate.py` | a rank's gate for one step |
| `member.py`, `worker.py` | a rank's side, and vLLM's worker with it |
| `pool.py`, `flight.py`, `crew.py` | the engine core's side: the pool, its steps, and the ranks as they are reached |
| `gathering.py`, `executor.py` | how ranks come to their core, and vLLM's executor that starts them |
| `connectors.py` | what the ranks' KV connectors say, as one |

Every wait is for a message or an event; nothing polls.
"""
