"""A transfer of weights of one's own: through files that all machines see."""

from pathlib import Path

from pydantic import BaseModel, Field
from safetensors.torch import load_file, save_file

from gkd.weights.transfer import Receiver, Sender, Transfer


class Writer(Sender):
    def pack(self, tensors, bucket):
        file = Path(self.settings.class_settings().directory, f"{bucket.version}-{bucket.number}.safetensors")
        save_file(tensors, file)
        return str(file)


class Reader(Receiver):
    def receive(self, bucket):
        tensors = load_file(bucket.contents[0])
        Path(f"{bucket.contents[0]}.read").touch()
        return tensors


class Files(Transfer):
    sender, receiver = Writer, Reader

    class Config(BaseModel):
        directory: str = Field(description="where all machines see the files")
