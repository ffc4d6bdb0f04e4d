"""The network as an immutable graph: capture from ONNX or PyTorch, rewriting, checking."""
