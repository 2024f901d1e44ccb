#!/usr/bin/env python3
"""Draws traces from a model of the specification: what a connection must do where it has no choice.

Written from ../protocol.md, not from an implementation. No limit but windows is ever reached (receives, send queue, time), so what each
step leads to is known. Of all seeds only those are kept whose trace shows something that no earlier one has shown.

    python3 spec/vectors/generate.py > spec/vectors/trace/generated.json
"""

import json

SEEDS = 400
STEPS = 24
# Addresses at which a sum of 32 bits, a signed number of 64 bits or a pointer of 48 bits is not enough; others have any bits.
EDGES = [0, 0xFFFFFFF8, 0x7FFFFFFFFFFFFFF8, 0xFFFFFFFFFE000000, 0x0000FFFFFFFFFFF0, 0x8000000000000000]
KEYS = [0, 0xFFFFFFFF, 0x80000000, 0x7FFFFFFF, 0x100]


class Dice:
    """A generator of numbers that is the same everywhere."""

    def __init__(self, seed):
        self.state = seed * 2 + 1

    def below(self, bound):
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self.state >> 33) % bound

    def pick(self, choices):
        return choices[self.below(len(choices))]


class Data:
    """Addresses and keys of a trace: what happens does not depend on them."""

    def __init__(self, seed):
        self.dice = Dice(seed + 2**32)
        self.base, self.rkey = self.address(), self.key()
        self.own = [(hex(self.address()), hex(self.key()))]
        while len(self.own) < 2:
            second, key = self.address(), self.key()
            if abs(second - int(self.own[0][0], 16)) >= 2**20 and hex(key) != self.own[0][1]:
                self.own.append((hex(second), hex(key)))

    def bits(self, count):
        return sum(self.dice.below(256) << 8 * at for at in range(count // 8))

    def address(self):
        return self.dice.pick(EDGES) if self.dice.below(3) == 0 else self.bits(64) % (2**64 - 2**24)

    def key(self):
        return self.dice.pick(KEYS) if self.dice.below(3) == 0 else self.bits(32)

    def next(self, place):
        """The peer's next window: at the address of the last one, near it, or elsewhere. Its key says nothing about the place."""
        address = [self.base, (self.base + 0x1000) % (2**64 - 2**24), self.address()][place]
        return address, self.rkey if self.dice.below(4) == 0 else self.key()


class Model:
    """One connection; `out` collects what it must do."""

    def __init__(self, role, window, windows, data):
        self.role, self.window, self.windows, self.data = role, window, windows, data
        self.state, self.out = "connecting", []
        self.number, self.arrived, self.read = -1, 0, 0  # our windows: the latest one's number, and counts of bytes
        self.peer, self.room, self.unsent = 0, 0, 0  # the peer's windows: their length, room in the latest
        self.answers, self.posted = [], 0

    def send(self, **message):
        self.out.append({"send": message})

    def registered(self, window):
        self.room = self.peer
        self.data.base, self.data.rkey = window

    def full(self):
        return self.arrived == (self.number + 1) * self.window

    def act(self):
        """Everything that can be done now."""
        if self.state != "open":
            return
        unread_before = self.number + 1 if self.windows == 1 else self.number
        if self.number < 0 or (self.full() and self.read >= unread_before * self.window):
            self.number += 1
            address, rkey = self.data.own[self.number % self.windows]
            self.send(kind="RegisterXferMemory", address=address, length=self.window, rkey=rkey)
        for select in self.answers:
            self.send(kind="GetServerFeature", select=select, features="0x0")
        self.answers = []
        length = min(self.unsent, self.room)
        if length:
            self.out.append({"payload": length})
            self.room -= length
            self.unsent -= length
        self.posted += len(self.out)

    def end(self, state):
        self.state, self.out = state, ["disconnect"]


def register(window, length):
    address, rkey = map(hex, window)
    return {"do": "receive", "message": {"kind": "RegisterXferMemory", "address": address, "length": length, "rkey": rkey}}


def feature(kind, select, features="0x0"):
    return {"do": "receive", "message": {"kind": kind, "select": select, "features": features}}


def breaches(model, dice):
    """Inputs that end the connection now, each with whom to blame."""
    room = 0 if model.number < 0 else (model.number + 1) * model.window - model.arrived
    found = [
        ({"do": "immediate", "value": room + 1 + dice.pick([0, 1, 1000])}, "peer-misbehaved"),
        ({"do": "bytes", "hex": "0004" + "00" * 30}, "invalid-message"),
        ({"do": "bytes", "hex": "0002" + "00" * dice.pick([0, 29, 31])}, "invalid-message"),
    ]
    if model.room:
        found.append((register(model.data.next(2), model.peer), "peer-misbehaved"))
    if model.role == "client":
        found.append((feature(dice.pick(["GetServerFeature", "SetClientFeature"]), 0), "peer-misbehaved"))
    if model.state == "open":
        found.append(({"do": "failed", "status": "RETRY_EXC_ERR"}, "transport"))
    return found


def inputs(model, dice):
    """What may happen now: an input and what it means to the model."""
    room = 0 if model.number < 0 else (model.number + 1) * model.window - model.arrived
    may = []

    def can(what, means):
        may.append((what, means))

    if model.state in ("connecting", "open"):
        length = 1 + dice.below(2 * max(model.peer, 1))
        can({"do": "write", "length": length}, lambda length=length: setattr(model, "unsent", model.unsent + length))
        can({"do": "receive", "message": {"kind": "Keepalive"}}, lambda: None)
        can({"do": "immediate", "value": 0}, lambda: None)
        if model.room == 0:
            window = model.data.next(dice.below(3))
            can(register(window, model.peer), lambda window=window: model.registered(window))
        if model.role == "server":
            select = dice.pick([0, 1, 0x102])
            if len(model.answers) < 3:
                can(feature("GetServerFeature", select), lambda: model.answers.append(select))
            can(feature("SetClientFeature", 0, dice.pick(["0x0", "0xffffffffffffffff"])), lambda: None)
    if model.state == "connecting":
        can({"do": "established", "rnr_retry": 7}, lambda: setattr(model, "state", "open"))
    if model.state == "open":
        can({"do": "acknowledged"}, lambda: setattr(model, "posted", 0))
        can({"do": "disconnected"}, lambda: model.end("closed"))
        for value in {1 + dice.below(room), room} if room else ():
            can({"do": "immediate", "value": value}, lambda value=value: setattr(model, "arrived", model.arrived + value))
    unread = model.arrived - model.read
    for length in {1 + dice.below(unread), unread} if unread else ():
        can({"do": "read", "length": length}, lambda length=length: setattr(model, "read", model.read + length))
    return may


def draw(seed):
    """The trace of a seed, and what it shows."""
    dice = Dice(seed)
    data = Data(seed)
    model = Model(dice.pick(["client", "server"]), dice.pick([1, 4, 64]), dice.pick([1, 1, 2]), data)
    model.peer = dice.pick([1, 3, 64, 1000])
    steps, shown = [], set()
    while len(steps) < STEPS:
        situation = (model.role, model.state, model.windows, model.full(), model.room > 0, model.unsent > 0)
        model.out = []
        if model.state in ("connecting", "open") and dice.below(STEPS) == 0:
            happens, blame = dice.pick(breaches(model, dice))
            model.end("failed")
            step = {"in": happens, "valid": False, "check": {"blame": blame}}
        else:
            may = inputs(model, dice)
            if not may:
                break
            # The end is as likely as a breach; what sets things going, more than the rest.
            what = [one for one in may if one[0]["do"] != "disconnected" or dice.below(8) == 0]
            likely = [one for one in what if one[0]["do"] in ("established", "immediate", "read")]
            happens, means = dice.pick(what + likely)
            if model.posted > 20:
                happens, means = {"do": "acknowledged"}, lambda: setattr(model, "posted", 0)
            means()
            model.act()
            check = {"state": model.state, "unread": model.arrived - model.read, "unsent": model.unsent}
            step = {"in": happens, "check": check}
            if model.state == "closed" and model.out == ["disconnect"]:
                step["optional"] = model.out  # VR-CLOSE-005 is a should
            elif model.out:
                step["out"] = model.out
            if len(model.out) > 1:
                step["any_order"] = True
        kinds = [out if out == "disconnect" else (out.get("send") or {"kind": "payload"})["kind"] for out in model.out]
        shown.add((happens["do"], happens.get("message", {}).get("kind"), situation, tuple(kinds)))
        steps.append(step)
    requirements = ["VR-XFER-001", "VR-MEM-010", "VR-FLOW-001", "VR-FLOW-004"]
    trace = {"id": f"trace/generated/seed-{seed}", "comment": f"Drawn by generate.py from the seed {seed}.", "role": model.role}
    trace["requirements"] = requirements + (["VR-CLOSE-007"] if model.state == "failed" else [])
    if model.windows == 2:
        trace["needs"] = ["second-window"]
    trace["settings"] = {"window": model.window, "windows": model.windows}
    for number, (address, rkey) in zip(["", "2"], data.own):
        trace["settings"] |= {f"address{number}": address, f"rkey{number}": rkey}
    trace["steps"] = steps
    return trace, shown


def main():
    kept, known = [], set()
    for seed in range(SEEDS):
        trace, shown = draw(seed)
        if len(shown - known) >= 6:
            known |= shown
            kept.append(trace)
    print('{\n  "format": "trace-1",\n  "about": "Drawn at random from a model of the specification; see generate.py.",\n  "traces": [')
    for number, trace in enumerate(kept):
        steps = trace.pop("steps")
        lines = [f"      {json.dumps(key)}: {json.dumps(value)}" for key, value in trace.items()]
        lines.append('      "steps": [\n' + ",\n".join("        " + json.dumps(step) for step in steps) + "\n      ]")
        print("    {\n" + ",\n".join(lines) + "\n    }" + ("," if number + 1 < len(kept) else ""))
    print("  ]\n}")


if __name__ == "__main__":
    main()
