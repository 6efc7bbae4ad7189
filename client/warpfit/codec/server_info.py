"""Encoding of a server's description."""

from dataclasses import fields
from typing import Any

from warpfit import server_info as info
from warpfit.codec.framing import TIERS, decodes_answer, printable
from warpfit.ops import OPERATORS
from warpfit.v1 import evaluator_pb2 as pb


def info_request() -> pb.GetServerInfoRequest:
    """Encode the request of GetServerInfo."""
    return pb.GetServerInfoRequest()


def info_to_message(server: info.ServerInfo) -> pb.ServerInfo:
    """Encode a server's description."""
    return pb.ServerInfo(
        version=server.version,
        engine=server.engine,
        devices=[
            pb.Device(**_fields(device, info.Device, tiers=[TIERS.codes[t] for t in device.tiers]))
            for device in server.devices
        ],
        limits=pb.Limits(**_fields(server.limits, info.Limits)),
        operators=[pb.OperatorInfo(**_fields(o, info.OperatorInfo)) for o in server.operators],
        datasets=server.datasets,
    )


@decodes_answer
def info_from_message(message: pb.ServerInfo) -> info.ServerInfo:
    """Decode a server's description."""
    return info.ServerInfo(
        version=printable(message.version),
        engine=printable(message.engine),
        devices=tuple(map(_device, message.devices)),
        limits=info.Limits(**_fields(message.limits, info.Limits)),
        operators=tuple(
            info.OperatorInfo(**_fields(o, info.OperatorInfo)) for o in message.operators
        ),
        datasets=message.datasets,
    )


def _device(message: pb.Device) -> info.Device:
    tiers = tuple(TIERS.member(tier, "tiers") for tier in message.tiers)
    return info.Device(**_fields(message, info.Device, tiers=tiers))


def _fields(source: object, cls: type, **converted: object) -> dict[str, Any]:
    """Return the fields of a dataclass by name, taken from a message or an object of the class."""
    found = {f.name: getattr(source, f.name) for f in fields(cls)} | converted
    return {name: printable(v) if isinstance(v, str) else v for name, v in found.items()}


def operator_infos() -> tuple[info.OperatorInfo, ...]:
    """Return the operator table of this version."""
    return tuple(
        info.OperatorInfo(op.code, op.name, op.arity, op.symbol or "", op.notes)
        for op in OPERATORS.values()
    )
