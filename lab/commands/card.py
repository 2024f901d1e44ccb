#!/usr/bin/env python3
"""The last part of lab/run card: predicted beside measured, a page and JSON, and nothing in them that names the machine.

  card.py FOLDER WORK BENCH LINK PLACE
"""
import ipaddress
import json
import os
import pathlib
import re
import subprocess
import sys


def predicted(bench, link, tcp_rate, *more):
    """The rows that the formula has for a machine, by request, size and side."""
    rate = ["--tcp-rate", str(tcp_rate)] if tcp_rate else []
    told = subprocess.run([bench, "predict", "--json", "--link", link, *rate, *more], check=True, capture_output=True)
    return {(row["request"], int(row["size"]), row["side"]): row for row in json.loads(told.stdout)}


def measured(work):
    """The figures: whose, over what, the options, and the outcomes of our benchmark."""
    for line in (work / "figures").read_text().splitlines() if (work / "figures").exists() else []:
        what, outcomes = line.split("\t")
        whose, transport, options = what.split(" ", 2)
        yield whose, transport, options, json.loads(outcomes)


def option(options, name, usual):
    """The value behind an option of a command line."""
    words = options.split()
    return words[words.index(name) + 1] if name in words else usual


def rows(work, bench, link):
    """A row for each measurement, with the prediction beside it where the formula has one."""
    figures = list(measured(work))
    found = []
    for whose, transport, options, outcomes in figures:
        # How fast the processor is, by the same server over TCP.
        tcp = [one["rate"] for w, t, _, all_ in figures if (w, t) == (whose, "tcp") for one in all_ if one["test"].upper() == "PING"]
        size, clients = int(option(options, "-d", 3)), option(options, "-c", "50")
        more = ["-c", clients] + (["--poll"] if "--spin" in options else [])
        formula = predicted(bench, link, tcp[0] if tcp else None, *more)
        side = "tcp" if transport == "tcp" else "valkey" if whose == "valkey" else "ours"
        for one in outcomes:
            beside = formula.get((one["test"].upper(), size, side))
            found.append(
                {
                    "server": whose,
                    "transport": transport,
                    "test": one["test"].upper(),
                    "options": options,
                    "rate": one["rate"],
                    "mean": one["latency"]["mean"],
                    "p99": one["latency"]["p99"],
                    "predicted_rate": beside and beside["rate"],
                }
            )
    return found


def steps(work):
    """Each step with its exit status and seconds."""
    lines = (line.split("\t") for line in (work / "steps").read_text().splitlines())
    return [{"step": name, "status": int(status), "seconds": int(seconds)} for name, status, seconds in lines]


def came_out(step):
    """What a step's exit status means."""
    file = step["step"] + ".txt"
    if step["status"] == 0:
        return "passed"
    if step["step"] == "suite-valkey" and step["status"] == 1:
        return f"some cases fail, see {file}; `docs/reports` has those of Valkey that fail everywhere"
    return f"FAILED, see {file}"


def page(place, link, found, done, folder):
    """What a person reads."""
    soft = " **No card: softrdma, in software. The figures say nothing of hardware.**" if place == "soft" else ""
    lines = [
        "# What Valkey over RDMA does on this machine",
        "",
        f"Made by `lab/run card`; `docs/card.md` says what to expect and where to send it.{soft}",
        "",
        "```text",
        (folder / "machine.txt").read_text().rstrip(),
        "```",
        "",
        "## Steps",
        "",
        "| step | came out | s |",
        "|---|---|---|",
    ]
    lines += [f"| {s['step']} | {came_out(s)} | {s['seconds']} |" for s in done]
    lines += [
        "",
        "## Measured, and predicted",
        "",
        f"The formula (`valkey-rdma-bench predict --link {link}`) had the rate of PINGs over TCP for the processor, and nothing else of this machine.",
        "",
        "| server | over | test | options | requests/s | µs mean | µs p99 | predicted requests/s | predicted ÷ measured |",
        "|---|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in found:
        formula = row["predicted_rate"]
        beside = f"{formula:.0f} | {formula / row['rate']:.2f}" if formula else "– | –"
        lines.append(
            f"| {row['server']} | {row['transport']} | {row['test']} | `{row['options']}` "
            f"| {row['rate']:.0f} | {row['mean']:.1f} | {row['p99']:.1f} | {beside} |"
        )
    return "\n".join(lines) + "\n"


def without_address(found):
    """An address, or what only looks like one."""
    try:
        address = ipaddress.ip_address(found[0].rstrip(".:"))
    except ValueError:
        return "ADDRESS" if re.fullmatch(r"(?:[0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}", found[0]) else found[0]
    return found[0] if address.is_loopback or address.is_unspecified else "ADDRESS"


def without_names(text, names):
    """A text in which no name of the machine, its user, its folders and addresses is left."""
    for name, stand_in in names:
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", stand_in, text)
    text = re.sub(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w])", without_address, text)
    return re.sub(r"(?<![\w:])[0-9a-fA-F:]*:[0-9a-fA-F:]*:[0-9a-fA-F:.]*", without_address, text)


def main():
    folder, work, bench, link, place = sys.argv[1:]
    folder, work = pathlib.Path(folder), pathlib.Path(work)
    found, done = rows(work, bench, link), steps(work)
    (folder / "page.md").write_text(page(place, link, found, done, folder))
    (folder / "card.json").write_text(json.dumps({"place": place, "link": float(link), "steps": done, "figures": found}, indent=1))
    # The longest first: a folder of a user's holds the user's name.
    pairs = [(str(pathlib.Path.cwd()), "REPOSITORY"), (str(work), "WORK"), (str(folder), "FOLDER"), (os.environ.get("HOME", ""), "HOME")]
    pairs += [(os.uname().nodename, "HOST")]
    pairs = [(name, stand_in) for name, stand_in in pairs if len(name) > 1]
    for file in folder.rglob("*"):
        if file.is_file():
            text = file.read_text(errors="replace")
            file.write_text(without_names(text, sorted(pairs, key=lambda pair: -len(pair[0]))))
    print(f"{folder}: page.md, card.json, and what each step printed")


main()
