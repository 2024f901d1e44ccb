//! Windows: the target's own, and what the adversary registers.

use std::time::Duration;

use rdma_conn::Descriptors;
use rdma_proto::wire::{Message, Window};

use super::bench::Bench;
use super::case::{Case, Role};
use super::meeting::{Meeting, registered_late, told};
use super::verdict::{Judged, Stop, lenient, pass};
use crate::adversary::{Adversary, Shape};

/// A payload longer than a few windows of the adversary's.
const LONG: usize = 200_000;

pub(super) fn cases<B: Descriptors>() -> Vec<Case<B>> {
    cases! {
        both "mem.registers-unprompted", "a peer that sends nothing" => "The target registers a window all the same.",
            ["VR-MEM-001"], unprompted;
        both "mem.length", "a connection" => "The target's window is 64 KiB to 16 MiB long.",
            ["VR-MEM-016"], length;
        both "mem.length-stays", "several windows are filled" => "Every window of the target is as long as the first.",
            ["VR-MEM-008", "VR-MEM-010"], length_stays;
        server "mem.not-before-full", "all of a window but its last byte is written"
            => "The server registers no other before the last byte has come, and one then.",
            ["VR-MEM-004", "VR-MEM-010"], not_before_full;
        both "mem.written-from-start", "windows at odd addresses, some way into memory of another byte"
            => "The target writes to the first byte of each window, on without a gap, and nothing behind what it notifies.",
            ["VR-MEM-002", "VR-FLOW-007"], written_from_start;
        both "mem.late", "a window that is registered 300 ms late" => "The target waits for it.",
            ["VR-FLOW-004", "VR-MEM-014"], |bench| registered_late(bench, 1, Duration::from_millis(300));
        server "mem.early", "a window registered before the server's has come" => "The server takes it.",
            ["VR-MEM-014", "VR-CONN-007"], early_registration;
        both "mem.window-of-1", "windows of one byte" => "The target writes through them.",
            ["VR-MEM-013", "VR-FLOW-001"], |bench| windows(bench, 300, vec![(0, 1)]);
        both "mem.window-of-100", "windows of 100 bytes" => "The target writes through them.",
            ["VR-MEM-013", "VR-FLOW-001"], |bench| windows(bench, 5000, vec![(0, 100)]);
        both "mem.window-of-4096", "windows of a page" => "The target writes through them.",
            ["VR-MEM-013"], |bench| windows(bench, LONG, vec![(0, 4096)]);
        both "mem.window-of-65535", "windows one byte short of 64 KiB" => "The target writes through them.",
            ["VR-MEM-013"], |bench| windows(bench, LONG, vec![(0, 65_535)]);
        both "mem.window-of-1-mib", "windows of 1 MiB" => "The target writes through them.",
            ["VR-MEM-013"], |bench| windows_in(bench, 1 << 20, 3 << 20, vec![(0, 1 << 20)]);
        both "mem.window-of-16-mib", "a window of 16 MiB" => "The target takes it: the limit is no lower.",
            ["VR-MEM-005", "VR-MEM-013"], |bench| windows_in(bench, 16 << 20, LONG, vec![(0, 16 << 20)]);
        both "mem.unaligned", "windows at addresses of no alignment" => "The target writes through them.",
            ["VR-MEM-013"], |bench| windows(bench, LONG, vec![(1, 4099), (4103, 4099), (8207, 4099)]);
        both "mem.same-again", "each full window registered again as it was" => "The target starts again at its beginning.",
            ["VR-MEM-011"], |bench| windows(bench, LONG, vec![(0, 65_536)]);
        both "mem.other-place", "each full window followed by one elsewhere" => "The target writes to the latest.",
            ["VR-MEM-011", "VR-MEM-002"], |bench| windows(bench, LONG, vec![(0, 8192), (16_384, 8192), (9000, 8192)]);
        both "mem.other-length", "each full window followed by one of another length"
            => "The target goes on with that length, or ends this connection; nothing else is affected.",
            ["VR-MEM-012"] [Disruptive], other_length;
        both "mem.of-0", "a window of no bytes" => "The target ends this connection.",
            ["VR-MEM-006"] [Disruptive], |bench| refused(bench, |peer| Window { length: 0, ..peer.own_window() });
        both "mem.of-4-gib", "a window of 4 GiB - 1" => "The target ends this connection, and pins no such memory.",
            ["VR-MEM-005", "VR-SEC-007"] [Disruptive], of_4_gib;
        both "mem.wraps", "a window beyond the address space" => "The target ends this connection.",
            ["VR-MEM-007"] [Disruptive], |bench| refused(bench, |peer| Window { address: u64::MAX - 100, ..peer.own_window() });
        both "mem.bogus-key", "a window with another key" => "The target's write fails, and with it this connection.",
            ["VR-MEM-009"], |bench| unwritable(bench, |peer| {
                let window = peer.own_window();
                Window { rkey: window.rkey ^ 0xff, ..window }
            });
        both "mem.bogus-address", "a window elsewhere" => "The target's write fails, and with it this connection.",
            ["VR-MEM-009"], |bench| unwritable(bench, |peer| {
                let window = peer.own_window();
                Window { address: window.address ^ (1 << 40), ..window }
            });
        both "mem.not-writable", "a window that its owner's device keeps closed"
            => "The target's write fails, and with it this connection.",
            ["VR-MEM-009"], |bench| unwritable(bench, Adversary::locked_window);
        both "mem.twice", "the same window again before it is used" => "The target ends this connection.",
            ["VR-MEM-004"] [Disruptive], twice;
        both "mem.one-byte-left", "a new window when one byte of the old is left" => "The target ends this connection.",
            ["VR-MEM-004"] [Disruptive], one_byte_left;
        both "mem.flood", "a thousand registrations" => "The target ends this connection; nobody else notices.",
            ["VR-MEM-004", "VR-RES-007"] [Disruptive], flood;
    }
}

fn unprompted<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let mut meeting = bench.meet(Shape::default())?;
    meeting.peer.await_window()?;
    meeting.peer.register()?;
    meeting.unharmed()
}

fn length<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let mut meeting = bench.greet()?;
    let length = meeting.peer.await_window()?.length;
    if !(64 << 10..=16 << 20).contains(&length) {
        return Err(Stop::unmet(format!("its window is {length} bytes long")));
    }
    told(meeting.unharmed(), || format!("{length} bytes"))
}

fn length_stays<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let mut meeting = bench.greet()?;
    let first = meeting.usable_window()?;
    let wanted = 4;
    while meeting.peer.seen.windows.len() < wanted {
        if !meeting.talk_of(first.length as usize)? {
            return Err(Stop::undecided(format!(
                "the client read too little to fill its window {wanted} times: GET conformance:bytes:N has N bytes"
            )));
        }
    }
    // A window that differs was booked as a breach.
    told(meeting.unharmed(), || format!("{wanted} windows of {} bytes", first.length))
}

fn not_before_full<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let mut meeting = bench.greet()?;
    let length = meeting.usable_window()?.length as usize;
    // A SET that fills the window but for its last byte, the value's final newline.
    let head = |payload: usize| format!("*3\r\n$3\r\nSET\r\n$15\r\nconformance:mem\r\n${payload}\r\n");
    let payload = length - head(length).len() - 2;
    let mut bytes = head(payload).into_bytes();
    bytes.resize(length - 2, b'x');
    bytes.extend_from_slice(b"\r\n");
    let (last, most) = bytes.split_last().ok_or_else(|| Stop::broken("an empty command"))?;
    meeting.peer.say(most)?;
    meeting.peer.settle()?;
    meeting.listen(Duration::from_millis(200))?;
    if meeting.peer.seen.windows.len() != 1 {
        return Err(Stop::unmet("it registered a window before the last byte had come"));
    }
    meeting.peer.say(&[*last])?;
    if meeting.peer.hear(5)? != b"+OK\r\n" {
        return Err(Stop::unmet("SET was not answered with +OK"));
    }
    // The next byte needs the next window.
    meeting.unharmed()
}

fn written_from_start<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let mut meeting = bench.meet(Shape::default())?;
    meeting.peer.paint(0xee);
    meeting.peer.plan = vec![(101, 40_000)];
    meeting.peer.handshake()?;
    let turn = meeting.occasion(100)?;
    if !meeting.client_asks() {
        meeting.peer.say(&turn.say)?;
        meeting.hears(&turn)?;
    }
    // A client that waits for its reply writes no more until it has it.
    let taken = meeting.peer.taken();
    if !meeting.peer.is_painted(0xee, 101 + taken as usize) {
        return Err(Stop::unmet(format!("it notified {taken} bytes, and wrote behind them")));
    }
    if meeting.client_asks() {
        meeting.peer.say(&turn.say)?;
    }
    told(meeting.unharmed(), || format!("{taken} bytes, and nothing behind them"))
}

fn early_registration<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let mut meeting = bench.meet(Shape::default())?;
    meeting.peer.register()?;
    meeting.peer.await_window()?;
    meeting.unharmed()
}

fn windows<B: Descriptors>(bench: &Bench<'_, B>, payload: usize, plan: Vec<(u32, u32)>) -> Judged {
    windows_in(bench, 64 << 10, payload, plan)
}

/// The target says something through windows as planned, in a memory of `memory` bytes.
fn windows_in<B: Descriptors>(
    bench: &Bench<'_, B>,
    memory: u32,
    payload: usize,
    plan: Vec<(u32, u32)>,
) -> Judged {
    let mut meeting = bench.meet(Shape::default().window(memory))?;
    if plan.iter().any(|(_, length)| *length < 10) {
        meeting.be_brief();
    }
    meeting.peer.plan = plan;
    meeting.peer.handshake()?;
    meeting.talk_of(payload)?;
    meeting.unharmed()
}

fn other_length<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let plan = vec![(0, 4096), (5000, 100), (1, 8191), (300, 1), (0, 65_536), (4096, 4097), (65_535, 1)];
    let mut meeting = bench.greet_with(plan)?;
    match meeting.talk_of(LONG) {
        Ok(_) => meeting.unharmed(),
        Err(_) => told(meeting.ends(), || "ended this connection".into()).map(|ended| lenient(ended.note)),
    }
}

/// Has the target write something, whatever becomes of it.
fn provoke<B: Descriptors>(meeting: &mut Meeting<'_, B>) -> Result<(), Stop> {
    if !meeting.client_asks() {
        meeting.peer.say(b"PING\r\n")?;
    }
    Ok(())
}

fn refused<B: Descriptors>(bench: &Bench<'_, B>, window: impl FnOnce(&Adversary<B>) -> Window) -> Judged {
    let mut meeting = bench.meet(Shape::default())?;
    let window = window(&meeting.peer);
    meeting.peer.message(Message::RegisterXferMemory(window))?;
    meeting.ends()
}

fn of_4_gib<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let held = || bench.server().ok()?.held();
    let before = held();
    let mut most = before;
    let mut meeting = bench.meet(Shape::default())?;
    let window = Window { length: u32::MAX, ..meeting.peer.own_window() };
    meeting.peer.message(Message::RegisterXferMemory(window))?;
    // When the server looks at it is its own affair: it is watched until it has ended the connection.
    let ended = meeting.ends_watched(|| {
        let now = held();
        if now.zip(most).is_none_or(|(now, most)| now.pinned_kib() > most.pinned_kib()) {
            most = now.or(most);
        }
    });
    if let (Some(before), Some(most)) = (before, most)
        && most.pinned_kib() > before.pinned_kib() + (1 << 20)
    {
        return Err(Stop::unmet(format!("before: {before}; then: {most}")));
    }
    ended
}

fn unwritable<B: Descriptors>(bench: &Bench<'_, B>, window: impl FnOnce(&Adversary<B>) -> Window) -> Judged {
    let mut meeting = bench.meet(Shape::default())?;
    let window = window(&meeting.peer);
    meeting.peer.await_window()?;
    meeting.peer.message(Message::RegisterXferMemory(window))?;
    provoke(&mut meeting)?;
    meeting.ends()
}

fn twice<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let mut meeting = bench.greet()?;
    meeting.peer.register()?;
    meeting.ends()
}

fn one_byte_left<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    // The reply to PING is 7 bytes long; a client is given room for its first command and more.
    let length = if bench.role() == Role::Client { 64 << 10 } else { 8 };
    let mut meeting = bench.greet_with(vec![(0, length)])?;
    if meeting.client_asks() {
        meeting.occasion(0)?;
    } else {
        meeting.peer.say(b"PING\r\n")?;
        meeting.peer.hear(7)?;
    }
    meeting.peer.register()?;
    meeting.ends()
}

fn flood<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let mut meeting = bench.greet()?;
    let again = meeting.peer.registration();
    // It may be over before all are sent.
    if meeting.peer.burst(&[again; 1000]).is_err() {
        return told(meeting.ends(), || "before all were sent".into());
    }
    let ended = meeting.ends()?;
    Ok(pass(ended.note))
}
