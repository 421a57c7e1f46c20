"""The thread that writes all texts of a server, a step of the scheduler after the other."""

import logging
import threading

import torch
from transformers import PreTrainedModel

from modeling_tnn import BatchScheduler
from modeling_tnn.serving.request import Request

logger = logging.getLogger("api")


class Engine:
    """A `BatchScheduler` that runs in a thread while there is something to write.

    Args:
        limits: those of `BatchScheduler`.
    """

    def __init__(self, model: PreTrainedModel, **limits):
        self.scheduler = BatchScheduler(model, **limits)
        self._awake = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="tnn-engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether texts are being written."""
        return self._thread.is_alive()

    def submit(self, ids: list[int], seed: int | None, **options) -> Request:
        """`BatchScheduler.submit` for a prompt of token ids, with its errors."""
        prompt = torch.tensor([ids], device=self.scheduler.model.device)
        request = self.scheduler.submit(prompt, seed=seed, attention_mask=torch.ones_like(prompt), **options)
        self._awake.set()
        return request

    def cancel(self, request: Request):
        """End a text at the next step."""
        self.scheduler.cancel(request)
        self._awake.set()

    def close(self):
        """End all texts and the thread."""
        self._is_closed = True
        self._awake.set()
        self._thread.join()
        self.scheduler.end_all()

    def _run(self):
        while not self._is_closed:
            if not self.scheduler.has_work:
                self._awake.wait()
            self._awake.clear()
            try:
                self.scheduler.step()
            except Exception as error:  # of no single text: all end, and the next ones begin afresh
                logger.exception("A step has failed")
                self.scheduler.end_all("error", error)
