"""Experiments: tasks, one resumable loop over methods and measurements, reports."""

from kvjax.evaluation import tasks as tasks
