//! Windows: the target's, and those of the suite's peer.

use std::time::Duration;

use rdma_conn::Descriptors;
use rdma_proto::wire::{Message, Window};

use super::case::{Case, Role};
use super::context::Context;
use super::session::{Session, command, registered_late, told};
use crate::tester::{Peer, Shape};
use suite::verdict::{lenient, pass};
use suite::{Judged, Stop};

/// Longer than a few windows of the suite's peer.
const LONG: usize = 200_000;

pub(super) fn cases<'a, B: Descriptors>() -> Vec<Case<'a, B>> {
    cases! {
        both "mem.registers-unprompted", "a peer that sends nothing" => "The target registers a window all the same.",
            ["VR-MEM-001"], unprompted;
        both "mem.length", "a connection" => "The target's window is 64 KiB to 16 MiB long.",
            ["VR-MEM-016"], length;
        both "mem.length-stays", "several windows are filled"
            => "Every window of a client is as long as the first. A server's never become shorter.",
            ["VR-MEM-008", "VR-MEM-010"], length_stays;
        server "mem.not-before-full", "all of a window but its last byte is written"
            => "The server registers no other before the last byte has come, and one then.",
            ["VR-MEM-004", "VR-MEM-010"], not_before_full;
        both "mem.written-from-start", "windows at odd addresses, some way into memory of another byte"
            => "The target writes to the first byte of each window, on without a gap, and nothing behind what it notifies.",
            ["VR-MEM-002", "VR-FLOW-007"], written_from_start;
        both "mem.late", "a window that is registered 300 ms late" => "The target waits for it.",
            ["VR-FLOW-004", "VR-MEM-014"], |context| registered_late(context, 1, Duration::from_millis(300));
        server "mem.early", "a window registered before the server's has come" => "The server takes it.",
            ["VR-MEM-014", "VR-CONN-007"], early_registration;
        both "mem.window-of-1", "windows of one byte" => "The target writes through them.",
            ["VR-MEM-013", "VR-FLOW-001"], |context| windows(context, 300, vec![(0, 1)]);
        both "mem.window-of-100", "windows of 100 bytes" => "The target writes through them.",
            ["VR-MEM-013", "VR-FLOW-001"], |context| windows(context, 5000, vec![(0, 100)]);
        both "mem.window-of-4096", "windows of a page" => "The target writes through them.",
            ["VR-MEM-013"], |context| windows(context, LONG, vec![(0, 4096)]);
        both "mem.window-of-65535", "windows one byte short of 64 KiB" => "The target writes through them.",
            ["VR-MEM-013"], |context| windows(context, LONG, vec![(0, 65_535)]);
        both "mem.window-of-1-mib", "windows of 1 MiB" => "The target writes through them.",
            ["VR-MEM-013"], |context| windows_in(context, 1 << 20, 3 << 20, vec![(0, 1 << 20)]);
        both "mem.window-of-16-mib", "a window of 16 MiB" => "The target takes it: the limit is no lower.",
            ["VR-MEM-005", "VR-MEM-013"], |context| windows_in(context, 16 << 20, LONG, vec![(0, 16 << 20)]);
        both "mem.unaligned", "windows at addresses of no alignment" => "The target writes through them.",
            ["VR-MEM-013"], |context| windows(context, LONG, vec![(1, 4099), (4103, 4099), (8207, 4099)]);
        both "mem.same-again", "each full window registered again as it was" => "The target starts again at its beginning.",
            ["VR-MEM-011"], |context| windows(context, LONG, vec![(0, 65_536)]);
        both "mem.other-place", "each full window followed by one elsewhere" => "The target writes to the latest.",
            ["VR-MEM-011", "VR-MEM-002"], |context| windows(context, LONG, vec![(0, 8192), (16_384, 8192), (9000, 8192)]);
        both "mem.landing", "windows one behind another in memory of another key, then back where the first was"
            => "The target writes each byte to the place that the window tells.",
            ["VR-MEM-018", "VR-MEM-011", "VR-MEM-002"], landing;
        client "mem.grows", "each full window followed by a longer one" => "The client goes on.",
            ["VR-MEM-021", "VR-MEM-002"], grows;
        both "mem.other-length", "each full window followed by one of another length"
            => "The target goes on with that length, or ends this connection; nothing else is affected.",
            ["VR-MEM-012"] [Disruptive], other_length;
        both "mem.of-0", "a window of no bytes" => "The target ends this connection.",
            ["VR-MEM-006"] [Disruptive], |context| refused(context, |peer| Window { length: 0, ..peer.own_window() });
        both "mem.of-4-gib", "a window of 4 GiB - 1" => "The target ends this connection, and pins no such memory.",
            ["VR-MEM-005", "VR-SEC-007"] [Disruptive], of_4_gib;
        both "mem.wraps", "a window beyond the address space" => "The target ends this connection.",
            ["VR-MEM-007"] [Disruptive], |context| refused(context, |peer| Window { address: u64::MAX - 100, ..peer.own_window() });
        both "mem.bogus-key", "a window with another key" => "The target's write fails, and with it this connection.",
            ["VR-MEM-009"], |context| unwritable(context, |peer| {
                let window = peer.own_window();
                Window { rkey: window.rkey ^ 0xff, ..window }
            });
        both "mem.bogus-address", "a window with another address" => "The target's write fails, and with it this connection.",
            ["VR-MEM-009"], |context| unwritable(context, |peer| {
                let window = peer.own_window();
                Window { address: window.address ^ (1 << 40), ..window }
            });
        both "mem.not-writable", "a window that its owner's device keeps closed"
            => "The target's write fails, and with it this connection.",
            ["VR-MEM-009"], |context| unwritable(context, Peer::locked_window);
        both "mem.twice", "the same window again before it is used" => "The target ends this connection.",
            ["VR-MEM-017"] [Disruptive], twice;
        both "mem.one-byte-left", "a new window when one byte of the old is left" => "The target ends this connection.",
            ["VR-MEM-017"] [Disruptive], one_byte_left;
        both "mem.flood", "a thousand registrations" => "The target ends this connection; others do not notice.",
            ["VR-MEM-017", "VR-RES-007"] [Disruptive], flood;
    }
}

fn unprompted<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.connect(Shape::default())?;
    session.peer.await_window()?;
    session.peer.register()?;
    session.unharmed()
}

fn length<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.open()?;
    let length = session.peer.await_window()?.length;
    if !(64 << 10..=16 << 20).contains(&length) {
        return Err(Stop::unmet(format!("its window is {length} bytes long")));
    }
    told(session.unharmed(), || format!("{length} bytes"))
}

fn length_stays<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.open()?;
    let first = session.usable_window()?;
    let wanted = 4;
    while session.peer.seen.windows.len() < wanted {
        if !session.exchange_of(first.length as usize)? {
            return Err(Stop::undecided(format!(
                "the client read too little to fill its window {wanted} times: GET conformance:bytes:N has N bytes"
            )));
        }
    }
    // A window that became shorter, or a client's that became longer, was recorded as a breach.
    let last = session.peer.seen.windows.last().map_or(first.length, |window| window.length);
    let grown = if last == first.length { String::new() } else { format!(", the last of {last}") };
    told(session.unharmed(), || format!("{wanted} windows of {} bytes{grown}", first.length))
}

fn not_before_full<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.open()?;
    let length = session.usable_window()?.length as usize;
    // The window's last byte is the command's final newline.
    let bytes = filling(length).ok_or_else(|| Stop::broken(format!("no command is {length} bytes long")))?;
    let (last, most) = bytes.split_last().ok_or_else(|| Stop::broken("an empty command"))?;
    session.peer.send_bytes(most)?;
    session.peer.settle()?;
    session.listen(Duration::from_millis(200))?;
    if session.peer.seen.windows.len() != 1 {
        return Err(Stop::unmet("it registered a window before the last byte had come"));
    }
    session.peer.send_bytes(&[*last])?;
    if session.peer.receive_bytes(5)? != b"+OK\r\n" {
        return Err(Stop::unmet("SET was not answered with +OK"));
    }
    // The next byte needs the next window.
    session.unharmed()
}

fn filling(length: usize) -> Option<Vec<u8>> {
    // Where the value's length gets another digit, no command fits, but one of the other key.
    [&b"conformance:mem"[..], b"conformance:mem:"].into_iter().find_map(|key| {
        let around = command(&[b"SET", key, b""]).len() - 1;
        let of_digits = |digits: usize| Some(vec![b'x'; length.checked_sub(around + digits)?]);
        let commands = (1..=9).filter_map(of_digits).map(|value| command(&[b"SET", key, &value]));
        commands.into_iter().find(|command| command.len() == length)
    })
}

fn written_from_start<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.connect(Shape::default())?;
    session.peer.paint(0xee);
    session.peer.plan = vec![(101, 40_000)];
    session.peer.handshake()?;
    let exchange = session.require_exchange(100)?;
    if !session.client_asks() {
        session.peer.send_bytes(&exchange.send)?;
        session.expect_reply(&exchange)?;
    }
    // A full window stays unchanged until the target has been judged by it.
    session.peer.drains = false;
    let taken = covered(&mut session, 101)?;
    session.peer.drains = true;
    if taken == 40_000 {
        session.peer.register()?;
    }
    if session.client_asks() {
        session.peer.send_bytes(&exchange.send)?;
    }
    told(session.unharmed(), || format!("{taken} bytes, and nothing behind them"))
}

/// Waits until bytes written to the window at `offset` are notified, and returns their number. A
/// target may notify after it writes, and a client need not wait for its reply.
fn covered<B: Descriptors>(session: &mut Session<'_, B>, offset: usize) -> Result<u32, Stop> {
    loop {
        let written = session.peer.painted_to(0xee).saturating_sub(offset);
        let taken = session.peer.taken();
        if written <= taken as usize {
            return Ok(taken);
        }
        match session.peer.receive_in_time()? {
            Some(incoming) => session.peer.absorb(incoming)?,
            None => return Err(Stop::unmet(format!("it notified {taken} bytes, and wrote {written}"))),
        }
    }
}

fn early_registration<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    // A held server has not even seen that the connection is established.
    let held = context.server()?.hold();
    let mut session = context.connect(Shape::default())?;
    session.peer.register()?;
    session.peer.settle()?;
    drop(held);
    session.peer.await_window()?;
    session.unharmed()
}

fn windows<B: Descriptors>(context: &Context<'_, B>, payload: usize, plan: Vec<(u32, u32)>) -> Judged {
    windows_in(context, 64 << 10, payload, plan)
}

fn windows_in<B: Descriptors>(
    context: &Context<'_, B>,
    memory: u32,
    payload: usize,
    plan: Vec<(u32, u32)>,
) -> Judged {
    let mut session = context.connect(Shape::default().window(memory))?;
    if plan.iter().any(|(_, length)| *length < 10) {
        session.be_brief();
    }
    session.peer.plan = plan;
    session.peer.handshake()?;
    session.exchange_of(payload)?;
    session.unharmed()
}

/// Behaves like a client whose values land in its own memory.
fn landing<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    const ORDINARY: u32 = 64 << 10;
    const WINDOW: u32 = 8192;
    let places: Vec<u32> = (0..6).map(|window| ORDINARY + 13 + window * WINDOW).collect();
    let mut session = context.connect(Shape::default().window(ORDINARY))?;
    session.peer.lands(13 + 6 * WINDOW)?;
    session.peer.plan = [0].into_iter().chain(places).map(|place| (place, WINDOW)).collect();
    session.peer.handshake()?;
    session.exchange_of(LONG)?;
    session.unharmed()
}

/// Behaves like a server whose windows double until they are as long as its memory (VR-MEM-020).
fn grows<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.connect(Shape::default())?;
    session.peer.plan = (8..=16).map(|power| (0, 1 << power)).collect();
    session.peer.plan_ends = true;
    session.peer.handshake()?;
    session.exchange_of(LONG)?;
    told(session.unharmed(), || "goes on".into())
}

fn other_length<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let plan = vec![(0, 4096), (5000, 100), (1, 8191), (300, 1), (0, 65_536), (4096, 4097), (65_535, 1)];
    let mut session = context.open_with(plan)?;
    let ended = session.or_ends(|session| {
        session.exchange_of(LONG)?;
        session.goes_on()
    })?;
    Ok(ended.map_or_else(|| pass("goes on"), |ended| lenient(ended.note)))
}

fn provoke<B: Descriptors>(session: &mut Session<'_, B>) -> Result<(), Stop> {
    if !session.client_asks() {
        session.peer.send_bytes(b"PING\r\n")?;
    }
    Ok(())
}

fn refused<B: Descriptors>(context: &Context<'_, B>, window: impl FnOnce(&Peer<B>) -> Window) -> Judged {
    let mut session = context.connect(Shape::default())?;
    let window = window(&session.peer);
    session.peer.message(Message::RegisterXferMemory(window))?;
    session.ends()
}

fn of_4_gib<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let held = || context.server().ok()?.held();
    let before = held();
    let mut most = before;
    let mut session = context.connect(Shape::default())?;
    let window = Window { length: u32::MAX, ..session.peer.own_window() };
    session.peer.message(Message::RegisterXferMemory(window))?;
    // The server may handle it at any time until it has ended the connection.
    let ended = session.ends_watched(|| {
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

fn unwritable<B: Descriptors>(context: &Context<'_, B>, window: impl FnOnce(&Peer<B>) -> Window) -> Judged {
    let mut session = context.connect(Shape::default())?;
    let window = window(&session.peer);
    session.peer.await_window()?;
    session.peer.message(Message::RegisterXferMemory(window))?;
    provoke(&mut session)?;
    session.ends()
}

fn twice<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.open()?;
    session.peer.register()?;
    session.ends()
}

fn one_byte_left<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    // The reply to PING is 7 bytes long. A client gets room for its first command and more.
    let length = if context.role() == Role::Client { 64 << 10 } else { 8 };
    let mut session = context.open_with(vec![(0, length)])?;
    if session.client_asks() {
        session.require_exchange(0)?;
    } else {
        session.peer.send_bytes(b"PING\r\n")?;
        session.peer.receive_bytes(7)?;
    }
    session.peer.register()?;
    session.ends()
}

fn flood<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.open()?;
    let again = session.peer.registration();
    // The connection may end before all are sent.
    if session.peer.burst(&[again; 1000]).is_err() {
        return told(session.ends(), || "before all were sent".into());
    }
    let ended = session.ends()?;
    Ok(pass(ended.note))
}

#[cfg(test)]
mod tests {
    use super::filling;

    #[test]
    fn a_command_fills_any_window() {
        let around = [1_000, 10_000, 100_000, 1_000_000, 1 << 10, 1 << 16, 1 << 20, 16 << 20];
        let lengths = (256..1200).chain(around.into_iter().flat_map(|length| length - 30..length + 30));
        for length in lengths {
            assert_eq!(filling(length).map(|command| command.len()), Some(length));
        }
    }
}
