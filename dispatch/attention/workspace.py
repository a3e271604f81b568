"""Workspaces that callers hand over and engines share between wrappers. Kernels take their memory from torch."""

import torch
from torch import Tensor

INT_WORKSPACE_BYTES = 8 << 20


class Workspaces:
    """The caller's float workspace, and an integer one with its host mirror, allocated when somebody looks at it."""

    def __init__(self, float_workspace_buffer: Tensor) -> None:
        self._take_float(float_workspace_buffer)
        self._int: Tensor | None = None
        self._pinned: Tensor | None = None

    def _take_float(self, buffer: Tensor) -> None:
        if not isinstance(buffer, Tensor):
            raise TypeError(f"float_workspace_buffer is a {type(buffer).__name__}, it must be a tensor")
        if buffer.data_ptr() % 16:
            raise ValueError(
                f"float_workspace_buffer starts at {buffer.data_ptr():#x}, it must be aligned to 16 bytes; allocate it "
                "with torch.empty"
            )
        self._float_workspace_buffer = buffer
        self.device = buffer.device

    @property
    def _int_workspace_buffer(self) -> Tensor:
        if self._int is None:
            self._int = torch.empty(INT_WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        return self._int

    @_int_workspace_buffer.setter
    def _int_workspace_buffer(self, buffer: Tensor) -> None:
        self._int, self._pinned = buffer, None

    @property
    def _pin_memory_int_workspace_buffer(self) -> Tensor:
        if self._pinned is None:
            like = self._int_workspace_buffer
            self._pinned = torch.empty(like.shape, dtype=like.dtype, pin_memory=self.device.type == "cuda")
        return self._pinned

    @_pin_memory_int_workspace_buffer.setter
    def _pin_memory_int_workspace_buffer(self, buffer: Tensor) -> None:
        self._pinned = buffer

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        """Replace both workspaces. The host mirror is made anew in the shape and dtype of the integer one.

        Args:
            float_workspace_buffer: any dtype, aligned to 16 bytes; its device is the wrapper's.
            int_workspace_buffer: uint8 on the same device.
        """
        self._take_float(float_workspace_buffer)
        self._int_workspace_buffer = int_workspace_buffer
