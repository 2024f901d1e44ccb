#!/usr/bin/env python3
"""A small implementation of Valkey over RDMA's messages and connection rules, written from the specification alone.

It speaks the protocol of ../../README.md on standard input and output; standard library only.

    valkey-rdma-conformance vectors check --shim 'python3 spec/vectors/consumers/python/consumer.py'
"""

import json
import struct
import sys

NOT_IMPLEMENTED = {
    "second-window": "one receive region",
    "silence-limit": "no limit for silence",
    "stall-limit": "no limit for waiting bytes",
    "questions": "asks nothing to learn what the peer has handled",
    "graceful-close": "does not wait for last bytes",
    "idle-peer": "takes acknowledgements for proof, keepalives' included",
    "vanished-limit": "waits for acknowledgements without a limit",
}
CONTROL_RESERVE = 4  # notifications and requests that payload leaves to control messages
GET, SET, KEEPALIVE, REGISTER = 0, 1, 2, 3
FEATURES = struct.Struct(">HH20xQ")
REGISTRATION = struct.Struct(">H14xQII")
KINDS = ["GetServerFeature", "SetClientFeature", "Keepalive", "RegisterXferMemory"]


class Breach(Exception):
    """The connection is over; the argument says who is to blame."""


def decode(raw):
    """A message as its fields, or the reason why it is none."""
    if len(raw) != 32:
        return None, "length"
    opcode, select, features = FEATURES.unpack(raw)
    if opcode > REGISTER:
        return None, "opcode"
    message = {"kind": KINDS[opcode]}
    if opcode in (GET, SET):
        message.update(select=select, features=hex(features))
    elif opcode == REGISTER:
        _, address, length, rkey = REGISTRATION.unpack(raw)
        message.update(address=hex(address), length=length, rkey=hex(rkey))
    return message, None


def encode(message):
    """The bytes of a message."""
    opcode = KINDS.index(message["kind"])
    if opcode == REGISTER:
        address, rkey = (int(message[field], 16) for field in ("address", "rkey"))
        return REGISTRATION.pack(opcode, address, message["length"], rkey)
    return FEATURES.pack(opcode, message.get("select", 0), int(message.get("features", "0x0"), 16))


class Connection:
    """One connection. Methods named on_… are what happens to it; `out` collects what it does."""

    def __init__(self, start):
        self.settings = start
        self.server = start["role"] == "server"
        self.state, self.blame, self.out = "connecting", None, []
        self.announced, self.received, self.read = False, 0, 0  # our window
        self.window, self.used = None, 0  # the peer's: (address, length, rkey)
        self.unsent = 0
        self.posted = 0  # send requests not completed
        self.unproven, self.at_full, self.at_announce, self.patient = 0, 0, 0, False
        self.answers = []
        self.question = "due" if start["negotiate"] and not self.server else None
        self.now, self.keepalive_at, self.keepalive = 0, None, None

    # What happens.

    def on_established(self, event):
        self.state = "open"
        self.patient = event["rnr_retry"] == 7
        if self.settings["keepalive_ms"]:
            self.keepalive_at = self.now + self.settings["keepalive_ms"]

    def on_receive(self, event):
        message, wrong = decode(bytes.fromhex(event["hex"]))
        if wrong:
            raise Breach("invalid-message")
        kind = message["kind"]
        if kind == "RegisterXferMemory":
            self.take_window(int(message["address"], 16), message["length"], int(message["rkey"], 16))
        elif kind == "GetServerFeature" and self.server:
            self.answers.append(message["select"])
            if len(self.answers) > 1024:
                raise Breach("peer-misbehaved")
        elif kind == "GetServerFeature":
            if self.question != "asked" or message["select"] != 0:
                raise Breach("peer-misbehaved")
            self.question = int(message["features"], 16) & int(self.settings["features"], 16)
        elif kind == "SetClientFeature" and not self.server:
            raise Breach("peer-misbehaved")

    def take_window(self, address, length, rkey):
        if self.window and self.used < self.window[1]:
            raise Breach("peer-misbehaved")
        if length > self.settings["window_limit"]:
            raise Breach("peer-incompatible")
        if length == 0 or address + length >= 1 << 64:
            raise Breach("peer-misbehaved")
        self.window, self.used = (address, length, rkey), 0
        # Our notifications up to the one that filled the old window have been handled.
        self.prove(self.at_full)

    def on_immediate(self, event):
        value = event["value"]
        if value == 0:
            return
        if not self.announced or self.received + value > self.settings["window"]:
            raise Breach("peer-misbehaved")
        self.received += value
        # So has our registration of the window that these bytes are in.
        self.prove(self.at_announce)

    def prove(self, handled):
        self.unproven -= handled
        self.at_full = max(0, self.at_full - handled)
        self.at_announce = max(0, self.at_announce - handled)

    def on_write(self, event):
        self.unsent += event["length"]

    def on_read(self, event):
        self.read += min(event["length"], self.received - self.read)
        if self.read == self.settings["window"]:
            self.received = self.read = 0
            self.announced = False

    def on_acknowledged(self, _):
        self.posted = 0
        if self.keepalive == "under way":
            self.keepalive = None
        if self.patient:
            self.prove(self.unproven)

    def on_failed(self, event):
        blame = {"LOC_LEN_ERR": "invalid-message", "REM_ACCESS_ERR": "peer-misbehaved"}
        blame["RNR_RETRY_EXC_ERR"] = "peer-misbehaved"
        raise Breach(blame.get(event["status"], "transport"))

    def on_disconnected(self, _):
        if self.state == "connecting":
            raise Breach("transport")
        self.state = "closed"
        self.out.append({"is": "disconnect"})

    def on_advance(self, event):
        until = self.now + event["ms"]
        while self.state == "open" and self.keepalive_at is not None and self.keepalive_at <= until:
            self.now = self.keepalive_at
            self.keepalive_at += self.settings["keepalive_ms"]
            self.keepalive = self.keepalive or "due"
            self.act()
        self.now = until

    # What it does.

    def room_for(self, what):
        reserve = 0
        if what == "payload":
            reserve = min(CONTROL_RESERVE, self.settings["peer_receives"] // 2, self.settings["send_depth"] // 2)
        return (
            self.unproven + reserve < self.settings["peer_receives"]
            and self.posted + reserve < self.settings["send_depth"]
        )

    def count(self):
        self.posted += 1
        self.unproven += 1

    def send(self, **message):
        self.out.append({"is": "send", "hex": encode(message).hex()})
        self.count()

    def act(self):
        """Does everything that can be done now."""
        while self.state == "open":
            if self.room_for("message") and self.next_message():
                continue
            length = min(self.unsent, self.window[1] - self.used) if self.window else 0
            if not length or not self.room_for("payload"):
                return
            address, whole, rkey = self.window
            write = {"is": "write", "address": hex(address + self.used), "rkey": hex(rkey)}
            self.out.append(write | {"length": length, "immediate": length})
            self.used += length
            self.unsent -= length
            self.count()
            if self.used == whole:
                self.at_full = self.unproven

    def next_message(self):
        if not self.announced:
            settings = self.settings
            self.send(
                kind="RegisterXferMemory",
                address=settings["address"],
                length=settings["window"],
                rkey=settings["rkey"],
            )
            self.announced, self.at_announce = True, self.unproven
        elif self.question == "due":
            self.send(kind="GetServerFeature")
            self.question = "asked"
        elif isinstance(self.question, int):
            self.send(kind="SetClientFeature", features=hex(self.question))
            self.question = None
        elif self.answers:
            self.send(kind="GetServerFeature", select=self.answers.pop(0), features=self.settings["features"])
        elif self.keepalive == "due":
            self.send(kind="Keepalive")
            self.keepalive = "under way"
        else:
            return False
        return True

    def take(self, event):
        """Handles one event; all lines of the answer."""
        self.out = []
        ended = self.state in ("closed", "failed")
        try:
            if not ended or event["do"] in ("read", "advance"):
                getattr(self, "on_" + event["do"])(event)
                self.act()
            elif event["do"] == "failed" and self.blame == "transport" and self.flushed:
                self.on_failed(event)
        except Breach as breach:
            self.out = [] if ended else [{"is": "disconnect"}]
            self.state, self.blame = "failed", breach.args[0]
        self.flushed = event.get("status") == "WR_FLUSH_ERR"
        end = {"is": "ok", "state": self.state, "unread": self.received - self.read, "unsent": self.unsent}
        if self.blame:
            end["blame"] = self.blame
        return self.out + [end]


def answer(request, connection):
    """The lines that answer a request, and the connection it leaves."""
    do = request["do"]
    if do == "hello":
        return [{"is": "hello", "name": "python-consumer", "version": "1", "protocol": 1}], connection
    if do == "decode":
        message, wrong = decode(bytes.fromhex(request["hex"]))
        if wrong:
            return [{"is": "invalid", "reason": wrong}], connection
        return [{"is": "message"} | message], connection
    if do == "encode":
        return [{"is": "bytes", "hex": encode(request).hex()}], connection
    if do == "start":
        for need in request["needs"].split():
            if need in NOT_IMPLEMENTED:
                return [{"is": "skip", "reason": NOT_IMPLEMENTED[need]}], None
        return [{"is": "ok", "state": "connecting", "unread": 0, "unsent": 0}], Connection(request)
    return connection.take(request), connection


def main():
    connection = None
    for line in sys.stdin:
        replies, connection = answer(json.loads(line), connection)
        for reply in replies:
            print(json.dumps(reply))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
