"""What is said of a hang: who, where, how long, and the frames that tell a user something."""

from __future__ import annotations

import dataclasses

from raytf.driver.supervision.watchdog import describe, innermost, quiet_ranks
from raytf.training.process.heartbeat_types import Activity, HangFinding, HeartbeatState, LastHeartbeat

#: Of `py-spy dump`, shortened.
STACKS = """Process 20642: ray::RayTrainWorker
Python v3.11.7 (/usr/bin/python3.11)

Thread 20642 (idle): "MainThread"
    Worker.main_loop (ray/_private/worker.py:1069)
Thread 20994 (idle): "TrainingThread(train_fn_with_final_checkpoint_flush)"
    quick_execute (tensorflow/python/eager/execute.py:53)
    TrainStep.__call__ (raytf/training/step/step.py:261)
    SynchronousExecutor._compute (raytf/training/synchronous.py:162)
    RayTrainWorker.run_train_fn (ray/train/v2/_internal/execution/worker_group/worker.py:152)
    Thread.run (threading.py:982)
Thread 21417 (idle): "raytf-input_0"
    Event.wait (threading.py:629)
    Warehouse.take (job.py:42)
    Pipeline._gather (raytf/data/pipeline.py:126)
    _WorkItem.run (concurrent/futures/thread.py:58)
    Thread.run (threading.py:982)"""


def beat(rank: int) -> HeartbeatState:
    return HeartbeatState(1, rank, 2, "n", f"10.0.0.{rank}", 100 + rank, step=36)


def test_the_thread_that_is_stuck_is_shown_without_libraries_frames():
    shown = innermost(STACKS, Activity.STEP)
    assert shown.startswith(
        "TrainStep.__call__ (raytf/training/step/step.py:261) < "
        "SynchronousExecutor._compute (raytf/training/synchronous.py:162) < Thread.run ("
    )
    assert innermost(STACKS, Activity.INPUT).startswith("Event.wait (threading.py:629) < Warehouse.take (job.py:42) < ")
    assert innermost("no stacks: py-spy is not installed", Activity.STEP) == ""


def test_those_to_blame_are_named_with_their_nodes():
    one = HangFinding((beat(1),), 31.4, "input", "stuck waiting for data")
    assert describe(one) == (
        "rank 1 on node 10.0.0.1 (pid 101) has made no progress for 31 s at step 36: stuck waiting for data"
    )
    both = describe(HangFinding((beat(0), beat(1)), 27.0, "collective", "all workers wait for each other"))
    assert both.startswith("rank 0 on node 10.0.0.0 (pid 100), rank 1 on node 10.0.0.1 (pid 101) have made no progress")


def test_ranks_without_recent_heartbeats_are_inspected_unless_they_are_done():
    there = [LastHeartbeat(beat(0), 1.0), LastHeartbeat(beat(1), 3.5)]
    done = LastHeartbeat(dataclasses.replace(beat(2), activity=Activity.DONE), 60.0)
    assert [each.rank for each in quiet_ranks([*there, done])] == [1]
