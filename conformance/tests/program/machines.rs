//! The machine in C, changed: sides that are unusual and right pass, sides that are wrong fail.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use conformance::requirements::workspace;
use vector_check::Files;
use vector_check::check::{self, Report};
use vector_check::shim::Shim;

use crate::spec::have;

/// Texts of the machine and what stands in their place.
type Edits = &'static [(&'static str, &'static str)];

const LENGTH: &str = "action->length = (uint32_t)least(length, m->set.send_buffer - action->offset);";
const WROTE: &str = "    if (m->used == m->window.length) m->filled = m->sent;\n    return true;";
const WROTE_ONE: &str =
    "    if (m->used == m->window.length) m->filled = m->sent;\n    wrote = m;\n    return true;";
const STATIC: &str = "static uint64_t least(";
const START: &str = "    m->set = *settings;\n";
const LIMIT: &str = "} else if (window->length > m->set.window_limit) {";
const WRITE: &str =
    "    if (length == 0 || !has_request(m, kept) || !may_notify(m, FOR_ANYTHING_ELSE)) return false;";

/// What the text allows and few do; the name of a part that such a side lacks.
const RIGHT: &[(&str, Edits, &[&str])] = &[
    // VR-FLOW-006, VR-FLOW-014.
    (
        "pieces of 16 bytes, an immediate each",
        &[(
            LENGTH,
            "action->length = (uint32_t)least(least(length, 16), m->set.send_buffer - action->offset);",
        )],
        &["one-notification"],
    ),
    ("pieces of one byte, an immediate each", &[(LENGTH, "action->length = 1;")], &["one-notification"]),
    // VR-FLOW-006, VR-XFER-004.
    (
        "WRITEs of one byte, one immediate",
        &[
            (LENGTH, "action->length = 1;"),
            (
                "    action->has_immediate = true;\n    action->immediate = action->length; /* VR-XFER-004 */\n",
                "    static uint32_t unnotified;\n    if (m->posted == 0) unnotified = 0;\n    unnotified++;\n    action->has_immediate = length == 1;\n    if (action->has_immediate) action->immediate = unnotified, unnotified = 0;\n",
            ),
            (
                "    book(m, action->length, true, false);",
                "    book(m, action->length, action->has_immediate, false);",
            ),
        ],
        &[],
    ),
    // VR-FEAT-001.
    (
        "a question after each write",
        &[
            (STATIC, "static const struct vkr_machine *wrote;\nstatic uint64_t least("),
            (START, "    wrote = NULL;\n    m->set = *settings;\n"),
            (WROTE, WROTE_ONE),
            (
                "    return !m->patient && m->asked == 0 &&",
                "    if (m->asked == 0 && !m->set.server && m->set.peer_receives > 3 && wrote == m) return true;\n    return !m->patient && m->asked == 0 &&",
            ),
            ("        m->asked = m->sent; /*", "        wrote = NULL;\n        m->asked = m->sent; /*"),
        ],
        &["one-notification", "negotiation"],
    ),
    (
        "questions with another select",
        &[
            (" || message->select != 0", " || message->select != 7"),
            (
                "send_feature(m, VKR_GET_SERVER_FEATURE, 0, 0, action);",
                "send_feature(m, VKR_GET_SERVER_FEATURE, 7, 0, action);",
            ),
        ],
        &[],
    ),
    // VR-MEM-012: a client's longer or shorter window, and a server's shorter one.
    (
        "an end at another length",
        &[(
            LIMIT,
            "} else if (window->length > m->set.window_limit || (m->has_window && (m->set.server ? m->window.length != window->length : window->length < m->window.length))) {",
        )],
        &[],
    ),
    // VR-XFER-010 is a should.
    (
        "an empty immediate after each write",
        &[
            (STATIC, "static const struct vkr_machine *wrote;\nstatic uint64_t least("),
            (START, "    wrote = NULL;\n    m->set = *settings;\n"),
            (WROTE, WROTE_ONE),
            (
                WRITE,
                "    if (wrote == m && m->set.peer_receives > 30 && has_request(m, kept) && may_notify(m, FOR_ANYTHING_ELSE)) {\n        wrote = NULL;\n        action->what = VKR_WRITE;\n        action->has_immediate = true;\n        action->address = m->window.address;\n        action->rkey = m->window.rkey;\n        book(m, 0, true, false);\n        return true;\n    }\n    if (length == 0 || !has_request(m, kept) || !may_notify(m, FOR_ANYTHING_ELSE)) return false;",
            ),
        ],
        &[],
    ),
    // VR-CLOSE-005 is a should.
    (
        "no disconnect in answer to the peer's",
        &[("else if (!over(m)) end(m); /* VR-CLOSE-005 */", "else if (!over(m)) m->state = VKR_CLOSED;")],
        &[],
    ),
];

/// Mistakes that vectors once let pass; each is noticed. `spec/vectors/mutants` has more.
const WRONG: &[(&str, Edits, &str)] = &[
    (
        "the sum of an address and a place has 32 bits",
        &[(
            "action->address = m->window.address + m->used;",
            "action->address = m->window.address >> 32 << 32 | (uint32_t)(m->window.address + m->used);",
        )],
        "trace/credits/nothing-is-proved-by-zero",
    ),
    (
        "the key of a known address is kept",
        &[(
            "        m->window = *window;\n",
            "        uint32_t key = m->has_window && m->window.address == window->address ? m->window.rkey : window->rkey;\n        m->window = *window;\n        m->window.rkey = key;\n",
        )],
        "trace/close/waits-for-a-window",
    ),
    (
        "a key has 31 bits",
        &[(
            "message->rkey = (uint32_t)get(bytes + 28, 4);",
            "message->rkey = (uint32_t)get(bytes + 28, 4) & 0x7fffffff;",
        )],
        "trace/stream/",
    ),
    (
        "a wait for a window keeps the clock of the wait for receives",
        &[
            (
                "        m->waits_for = wait;\n        m->waits_since = now;\n",
                "        if (m->waits_for != VKR_RECEIVES || wait == VKR_NOTHING) m->waits_since = now;\n        m->waits_for = wait;\n",
            ),
            ("    if (m->waits_for == VKR_RECEIVES) m->waits_for = VKR_NOTHING;\n", ""),
        ],
        "trace/limits/from-receives-to-a-window",
    ),
    (
        "a side that closes answers no question",
        &[("if (m->answers > 0) {", "if (m->answers > 0 && m->state == VKR_OPEN) {")],
        "trace/close/answers-while-closing",
    ),
    (
        "a Keepalive is due after silence only",
        &[(
            "if (next_message(m, now, action) || next_write(m, action)) return true;",
            "if (next_message(m, now, action) || next_write(m, action)) {\n            if (m->keepalive_at != NEVER) m->keepalive_at = now + m->set.keepalive;\n            return true;\n        }",
        )],
        "trace/keepalive/beside-other-traffic",
    ),
    (
        "a question is refused for its reserved bytes",
        &[(
            "    if (vkr_decode(bytes, length, &message) != NULL) {",
            "    for (size_t at = 4; length == VKR_MESSAGE && bytes[1] == 0 && at < 24; at++)\n        if (bytes[at] != 0) fail(m, VKR_INVALID_MESSAGE);\n    if (vkr_decode(bytes, length, &message) != NULL) {",
        )],
        "trace/features/",
    ),
    (
        "one byte of an answer's select is compared",
        &[("message->select != 0)", "(message->select & 0xff) != 0)")],
        "trace/features/",
    ),
    (
        "an immediate has 31 bits",
        &[("    if (value == 0) return;", "    value &= 0x7fffffff;\n    if (value == 0) return;")],
        "trace/refused/",
    ),
    (
        "an immediate has 24 bits",
        &[("    if (value == 0) return;", "    value &= 0xffffff;\n    if (value == 0) return;")],
        "trace/refused/",
    ),
    (
        "a longer window ends the connection",
        &[(
            LIMIT,
            "} else if (window->length > m->set.window_limit || (m->has_window && window->length > m->window.length)) {",
        )],
        "trace/stream/windows-that-grow",
    ),
];

/// Builds the shim of the changed machine. `None` without a compiler.
fn build(name: &str, edits: Edits) -> Option<Shim> {
    // A shell gets the path in quotes.
    let folder = name.replace(|one: char| !one.is_ascii_alphanumeric(), "-");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("machines").join(folder);
    std::fs::create_dir_all(&folder).unwrap();
    let source = workspace().unwrap().join("spec/examples/c");
    let mut text = std::fs::read_to_string(source.join("machine.c")).unwrap();
    for (from, to) in edits {
        assert_eq!(text.matches(from).count(), 1, "{name}: {from}");
        text = text.replace(from, to);
    }
    let [machine, shim] = ["machine.c", "shim"].map(|file| folder.join(file));
    std::fs::write(&machine, text).unwrap();
    let mut cc = Command::new("cc");
    cc.args(["-std=c99", "-D_POSIX_C_SOURCE=200809L", "-O1", "-I"]).arg(&source).arg(&machine);
    let built = cc.arg(source.join("shim.c")).arg("-o").arg(&shim).output().unwrap();
    assert!(built.status.success(), "{name}: {}", String::from_utf8_lossy(&built.stderr));
    Some(Shim::new(format!("'{}'", shim.display()), Duration::from_secs(600)))
}

fn run(files: &Files, name: &str, edits: Edits, select: &str) -> Option<Report> {
    have("cc", "--version")
        .then(|| build(name, edits))
        .flatten()
        .map(|mut shim| check::run(files, &mut shim, select).unwrap())
}

#[test]
fn unusual_and_right_sides_pass() {
    for (number, (name, edits, lacks)) in (0..).zip(RIGHT) {
        let mut files = Files::built_in().unwrap();
        // As they are, and elsewhere.
        files.move_windows(number % 2);
        let Some(report) = run(&files, name, edits, "") else { return };
        let failed: Vec<_> = report.failed.iter().filter(|(id, _)| !needs(&files, id, lacks)).collect();
        assert!(failed.is_empty() && report.passed > 200, "{name}: {failed:#?}");
    }
}

/// Returns whether a trace needs one of these parts.
fn needs(files: &Files, id: &str, parts: &[&str]) -> bool {
    let mut traces = files.traces.iter().flat_map(|(_, file)| &file.traces);
    let trace = traces.find(|trace| trace.id == *id);
    let needs = trace.map(|trace| serde_json::to_string(&trace.needs).unwrap()).unwrap_or_default();
    parts.iter().any(|part| needs.contains(part))
}

#[test]
fn wrong_sides_fail() {
    let files = Files::built_in().unwrap();
    for (name, edits, select) in WRONG {
        let Some(report) = run(&files, name, edits, select) else { return };
        assert!(!report.failed.is_empty(), "{name}: {select} did not notice");
    }
}

/// With other addresses and keys everything is as before, and a mistake of arithmetic is noticed by
/// more traces.
#[test]
fn windows_elsewhere_change_nothing() {
    let (_, edits, _) = WRONG[0];
    for seed in 1..4 {
        let mut files = Files::built_in().unwrap();
        files.move_windows(seed);
        let ours = check::run(&files, &mut vector_check::ours::Ours::default(), "").unwrap();
        assert_eq!((ours.failed, ours.lenient), (Vec::new(), Vec::new()), "seed {seed}");
        let Some(report) = run(&files, "elsewhere", edits, "trace/") else { return };
        assert!(report.failed.len() > 10, "seed {seed}: {}", report.failed.len());
    }
}
