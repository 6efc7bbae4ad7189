"""Encoding of a server's description."""

from __future__ import annotations

from dataclasses import fields

from warpfit import server_info as info
from warpfit.codec.framing import TIER_MEMBERS, TIERS, enum_member
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
            pb.Device(
                name=device.name,
                threads=device.threads,
                memory=device.memory,
                compute_capability=device.compute_capability,
                driver=device.driver,
                tiers=[TIERS[tier] for tier in device.tiers],
            )
            for device in server.devices
        ],
        limits=pb.Limits(**{f.name: getattr(server.limits, f.name) for f in fields(info.Limits)}),
        operators=[
            pb.OperatorInfo(code=o.code, name=o.name, arity=o.arity, symbol=o.symbol, notes=o.notes)
            for o in server.operators
        ],
    )


def info_from_message(message: pb.ServerInfo) -> info.ServerInfo:
    """Decode a server's description."""
    return info.ServerInfo(
        version=message.version,
        engine=message.engine,
        devices=tuple(
            info.Device(
                name=device.name,
                threads=device.threads,
                memory=device.memory,
                compute_capability=device.compute_capability,
                driver=device.driver,
                tiers=tuple(enum_member(TIER_MEMBERS, tier, "tiers") for tier in device.tiers),
            )
            for device in message.devices
        ),
        limits=info.Limits(
            **{f.name: getattr(message.limits, f.name) for f in fields(info.Limits)}
        ),
        operators=tuple(
            info.OperatorInfo(o.code, o.name, o.arity, o.symbol, o.notes) for o in message.operators
        ),
    )


def operator_infos() -> tuple[info.OperatorInfo, ...]:
    """Return the operator table of this version."""
    return tuple(
        info.OperatorInfo(op.code, op.name, op.arity, op.symbol or "", op.notes)
        for op in OPERATORS.values()
    )
