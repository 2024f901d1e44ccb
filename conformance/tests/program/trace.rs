//! Recordings: their contents, and their conversions.

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use conformance::requirements::workspace;
use intercept::trace::recording::EntryKind;
use intercept::trace::{Limits, Recorded, Recorder, Recording, packets, timeline};
use rdma_conn::{Connect, Descriptors, Listener, Options, Stream};
use rdma_softsim::Fabric;

const WINDOW: u32 = 4096;

fn small(mut options: Options) -> Options {
    options.protocol.window = WINDOW;
    options.protocol.send_buffer = WINDOW;
    options
}

fn echo<B: Descriptors, C: Descriptors>(server: &B, client: &C, address: SocketAddr, len: usize) {
    let listener =
        Listener::bind_with(server, address, small(Options::default()), rdma_conn::Limits::default())
            .unwrap();
    let address = listener.local_addr().unwrap_or(address);
    let echoing = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut bytes = vec![0; len];
        stream.read_exact(&mut bytes).unwrap();
        stream.write_all(&bytes).unwrap();
        stream.flush().unwrap();
        assert_eq!(stream.read(&mut bytes).unwrap(), 0, "the client ends it");
    });
    let how = Connect::default().options(small(Options::default()));
    let mut stream = Stream::connect_with(client, address, &how).unwrap();
    let sent: Vec<u8> = (0..len).map(|at| at as u8).collect();
    stream.write_all(&sent).unwrap();
    stream.flush().unwrap();
    let mut got = vec![0; len];
    stream.read_exact(&mut got).unwrap();
    assert_eq!(got, sent);
    stream.close(Duration::from_secs(5)).unwrap();
    drop(stream);
    echoing.join().unwrap();
}

const SERVER: [u8; 4] = [192, 0, 2, 1];
const CLIENT: [u8; 4] = [192, 0, 2, 2];

fn record(both: bool, limits: Limits, len: usize) -> Recording {
    let fabric = Fabric::new();
    let recorder = Recorder::new(limits);
    let server = if both { recorder.clone() } else { Recorder::new(Limits::NOTHING) };
    let server = Recorded::new(fabric.host(&[SERVER.into()]), &server);
    let client = Recorded::new(fabric.host(&[CLIENT.into()]), &recorder);
    echo(&server, &client, (SERVER, 6379).into(), len);
    recorder.recording()
}

#[test]
fn both_ends_recorded_are_one_page_of_two_lanes() {
    let page = timeline::render(&record(true, Limits::default(), 6000));
    println!("{page}");
    assert_eq!(page.matches("connection ").count(), 1);
    let lines = |what: &str| page.lines().filter(|line| line.contains(what)).count();
    // Each window at first and when it was full, posted by one end and received by the other.
    assert_eq!(lines("post RegisterXferMemory 4096 bytes"), 4);
    assert_eq!(lines("took RegisterXferMemory 4096 bytes"), 4);
    assert_eq!(
        lines("WRITE 4096 bytes at 0 of 4096, full, imm 4096"),
        2,
        "a window is filled to its last byte"
    );
    assert_eq!(lines("at 0 of 4096, imm 1904"), 2);
    assert_eq!(lines("took imm 4096"), 2);
    assert_eq!(lines("event: Established"), 2);
    assert_eq!(lines("event: ConnectRequest"), 1);
    assert_eq!(lines(" ["), 0, "nothing is remarked on");
    let head = page.lines().nth(1).unwrap();
    let lane = head.split("server").next().unwrap().chars().count();
    let accept = page.lines().find(|line| line.contains("call: accept")).unwrap();
    let lane_of = |line: &str, what: &str| line.find(what).map(|at| line[..at].chars().count());
    assert_eq!(lane_of(accept, "call: accept"), Some(lane), "what the server does is to the right");
}

#[test]
fn a_narrow_terminal_has_one_lane() {
    let page = timeline::render(&record(true, Limits::default(), 6000));
    assert_eq!(timeline::narrow(&page, 200), page);
    let narrow = timeline::narrow(&page, 80);
    println!("{narrow}");
    assert!(page.lines().any(|line| line.chars().count() > 80));
    assert!(narrow.lines().all(|line| line.chars().count() <= 80));
    assert_eq!(narrow.matches("  server  call: accept").count(), 1);
    assert_eq!(narrow.matches("  client  call: connect").count(), 1);
    assert_eq!(narrow.matches("  client  event: Established").count(), 1);
    let words = |text: &str| text.split_whitespace().filter(|word| word.starts_with("0x")).count();
    assert_eq!(words(&narrow), words(&page), "nothing is lost");
}

#[test]
fn a_peer_that_is_not_recorded_is_told_by_what_arrives() {
    let recording = record(false, Limits::default(), 6000);
    let page = timeline::render(&recording);
    println!("{page}");
    assert!(page.contains("server not recorded"));
    assert!(page.contains("RegisterXferMemory 4096 bytes at 0x"));
    let found = page.contains("at 0 of 4096, full, imm 4096, as it arrived");
    assert!(found, "its bytes are found in our window");
    // The bytes themselves: those of the echo are the same at the client and the server.
    let lines: Vec<u8> = recording
        .entries
        .iter()
        .filter_map(|entry| match &entry.what {
            EntryKind::Completed { id, outcome } => outcome.arrived(*id).filter(|it| it.immediate.is_some()),
            _ => None,
        })
        .flat_map(|request| request.bytes.0.into_iter().take(2))
        .collect();
    assert_eq!(lines, [0, 1, 0, 1], "4096 is a whole number of the pattern's length");
}

#[test]
fn a_recording_reads_as_it_was_written() {
    let recording = record(true, Limits::default(), 100);
    let mut text = Vec::new();
    recording.write(&mut text).unwrap();
    assert_eq!(Recording::read(&text[..]).unwrap(), recording);

    let wrong = |text: &str| Recording::read(text.as_bytes()).unwrap_err().to_string();
    assert!(wrong("").starts_with("line 1: not the beginning of a recording"));
    assert!(wrong("{\"valkey-rdma-recording\":2}").starts_with("line 1: version 2"));
    assert!(wrong("{\"valkey-rdma-recording\":1}\n{}").starts_with("line 2: missing field"));
}

#[test]
fn packets_are_what_was_sent_and_answered() {
    let recording = Recording::read(
        &br#"{"valkey-rdma-recording":1}
{"at":0,"end":1,"what":"created"}
{"at":0,"end":1,"what":"queue-pair","number":7,"sends":9,"receives":9}
{"at":1,"end":1,"what":"posted","id":1,"op":"read","remote":{"address":4096,"rkey":5},"len":5000,"signaled":true,"bytes":""}
{"at":2,"end":1,"what":"completed","id":1,"outcome":"done","op":"read"}
{"at":3,"end":1,"what":"posted","id":2,"op":"send","len":32,"signaled":true,"bytes":"0002"}
{"at":4,"end":1,"what":"posted","id":3,"op":"write","remote":{"address":4096,"rkey":5},"immediate":9,"len":9,"signaled":false,"bytes":""}
{"at":5,"end":1,"what":"completed","id":2,"outcome":"failed","status":13,"vendor":0}
{"at":6,"end":1,"what":"completed","id":3,"outcome":"failed","status":5,"vendor":0}
{"at":7,"end":1,"what":"posted","id":4,"op":"send","len":32,"signaled":true,"bytes":""}
{"at":8,"end":1,"what":"posted","id":5,"op":"send","len":32,"signaled":true,"bytes":""}
{"at":9,"end":1,"what":"refused","requests":1,"error":"no room"}"#[..],
    )
    .unwrap();
    // After Ethernet, IPv4 and UDP: the opcode, and after 9 bytes the sequence number.
    let told = |frame: &packets::Frame| (frame.at.as_nanos(), frame.bytes[42], frame.bytes[53]);
    let told: Vec<_> = packets::frames(&recording).iter().map(told).collect();
    let read = [(1, 12, 0), (2, 13, 0), (2, 15, 1)];
    let (send, refused_by_the_peer, sent) = ((3, 4, 2), (5, 17, 2), (7, 4, 3));
    assert_eq!(told, [&read[..], &[send, refused_by_the_peer, sent]].concat());
}

/// A completion or a refusal after a gap belongs to a request in the gap, whatever its id.
#[test]
fn packets_before_missing_entries_were_sent() {
    let recording = Recording::read(
        &br#"{"valkey-rdma-recording":1}
{"at":0,"end":1,"what":"created"}
{"at":1,"end":1,"what":"posted","id":1,"op":"send","len":32,"signaled":true,"bytes":""}
{"at":2,"end":1,"what":"posted","id":2,"op":"send","len":32,"signaled":true,"bytes":""}
{"at":3,"end":1,"what":"posted","id":3,"op":"send","len":32,"signaled":true,"bytes":""}
{"at":4,"end":0,"what":"dropped","count":9}
{"at":4,"end":1,"what":"refused","requests":1,"error":"no room"}
{"at":5,"end":1,"what":"completed","id":1,"outcome":"done","op":"send"}
{"at":6,"end":1,"what":"completed","id":2,"outcome":"failed","status":5,"vendor":0}"#[..],
    )
    .unwrap();
    let told: Vec<_> =
        packets::frames(&recording).iter().map(|it| (it.at.as_nanos(), it.bytes[42])).collect();
    assert_eq!(told, [(1, 4), (2, 4), (3, 4)]);
}

#[test]
fn recordings_can_be_taken_one_after_the_other() {
    let fabric = Fabric::new();
    let recorder = Recorder::new(Limits::default());
    let server = Recorded::new(fabric.host(&[SERVER.into()]), &recorder);
    let client = fabric.host(&[CLIENT.into()]);
    let (address, limits) = (SocketAddr::from((SERVER, 6379)), rdma_conn::Limits::default());
    let listener = Listener::bind_with(&server, address, small(Options::default()), limits).unwrap();
    let address = listener.local_addr().unwrap();
    let how = Connect::default().options(small(Options::default()));
    let dial = std::thread::spawn(move || Stream::connect_with(&client, address, &how).unwrap());
    let (mut stream, _) = listener.accept().unwrap();
    stream.flush().unwrap();
    let mut peer = dial.join().unwrap();
    let first = timeline::render(&recorder.take());
    let title = "connection 1: client not recorded; server 192.0.2.1:6379 (queue pair";
    assert!(first.starts_with(title), "{first}");
    stream.write_all(b"more").unwrap();
    peer.read_exact(&mut [0; 4]).unwrap();
    let second = timeline::render(&recorder.take());
    assert!(second.contains("connected before the recording began"), "{second}");
    assert!(second.contains("post WRITE 4 bytes"), "{second}");
}

#[test]
fn a_full_recorder_keeps_both_ends_and_says_what_is_missing() {
    let recording = record(true, Limits { entries: 20, bytes: 8 }, 100_000);
    let entries = &recording.entries;
    assert_eq!(entries.len(), 21);
    assert!(matches!(entries[10].what, EntryKind::Dropped { count: 100.. }), "{:?}", entries[10]);
    assert!(matches!(entries[0].what, EntryKind::Created));
    assert!(timeline::render(&recording).contains("entries are missing"));
    assert_eq!(record(true, Limits::NOTHING, 10).entries, []);
}

#[test]
fn what_follows_missing_entries_is_not_judged_by_what_came_before_them() {
    for both in [true, false] {
        for entries in (20..120).step_by(10) {
            let page = timeline::render(&record(both, Limits { entries, bytes: 32 }, 150_000));
            assert!(page.contains("entries are missing") && !page.contains(" ["), "{page}");
        }
    }
    let recording = Recording::read(
        &br#"{"valkey-rdma-recording":1}
{"at":0,"end":1,"what":"created"}
{"at":1,"end":1,"what":"completed","id":9,"outcome":"received","len":32,"bytes":"0003000000000000000000000000000000000000000010000000100000000005"}
{"at":2,"end":1,"what":"posted","id":1,"op":"write","remote":{"address":4096,"rkey":5},"immediate":8,"len":8,"signaled":false,"bytes":""}
{"at":3,"end":0,"what":"dropped","count":1}
{"at":3,"end":1,"what":"posted","id":3,"op":"write","remote":{"address":4112,"rkey":5},"immediate":16,"len":8,"signaled":false,"bytes":""}
{"at":4,"end":1,"what":"posted","id":4,"op":"write","remote":{"address":4120,"rkey":5},"immediate":9,"len":8,"signaled":false,"bytes":""}
{"at":5,"end":1,"what":"completed","id":9,"outcome":"received","len":32,"bytes":"0003000000000000000000000000000000000000000010000000100000000005"}
{"at":6,"end":1,"what":"posted","id":5,"op":"write","remote":{"address":4096,"rkey":5},"immediate":9,"len":8,"signaled":false,"bytes":""}
"#[..],
    )
    .unwrap();
    let page = timeline::render(&recording);
    let remarks: Vec<_> = page.lines().filter(|line| line.contains(" [")).collect();
    assert_eq!(remarks.len(), 1, "{page}");
    assert!(remarks[0].contains("at 0 of 4096, imm 9 [8 bytes were written]"), "{page}");
}

#[test]
fn the_invariant_crc_is_that_of_real_packets() {
    // A header of 24 bytes, then frames, each after 16 bytes with its length (pcap-savefile(5)).
    let capture = std::fs::read(capture()).unwrap();
    let (mut rest, mut count) = (&capture[24..], 0);
    while let Some((header, behind)) = rest.split_at_checked(16) {
        let len = u32::from_le_bytes(*header[8..].first_chunk().unwrap()) as usize;
        let (frame, behind) = behind.split_at(len);
        assert_eq!(roce::invariant_crc(frame), frame.last_chunk().copied(), "frame {count}");
        (rest, count) = (behind, count + 1);
    }
    assert_eq!(count, 49);
    assert_eq!(roce::invariant_crc(&[0; 64]), None, "no IP");
}

fn capture() -> PathBuf {
    workspace().unwrap().join("spec/wireshark/valkey-9.1.2.pcap")
}

/// Returns tshark's lines about a file's packets, with the dissector, if there is tshark.
fn tshark(file: &Path, arguments: &[&str]) -> Option<String> {
    let dissector = workspace().unwrap().join("spec/wireshark/valkey-rdma.lua");
    let script = format!("lua_script:{}", dissector.display());
    let mut command = Command::new("tshark");
    let output = command.arg("-r").arg(file).args(["-X", &script]).args(arguments).output();
    let Ok(output) = output else {
        println!("skipped: there is no tshark here");
        return None;
    };
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && !said.contains("Lua"), "{said}");
    Some(String::from_utf8(output.stdout).unwrap())
}

const INFO: [&str; 4] = ["-T", "fields", "-e", "_ws.col.Info"];

/// A capture between soft-RoCE devices: our client, then valkey-cli, with a Valkey server.
#[test]
fn the_dissector_names_what_is_in_a_real_capture() {
    let Some(page) = tshark(&capture(), &INFO) else { return };
    let lines = |what: &str| page.lines().filter(|line| line.contains(what)).count();
    assert_eq!(page.lines().count(), 49);
    assert_eq!(lines("RC Send Only QP="), 7);
    assert_eq!(lines("RegisterXferMemory 65536 bytes at 0x"), 3, "{page}");
    assert_eq!(lines("RegisterXferMemory 1048576 bytes at 0x"), 3, "{page}");
    assert_eq!(lines("Keepalive"), 1, "{page}");
    assert_eq!(lines("WRITE 14 bytes at 0 of 65536, imm 14"), 3, "{page}");
    assert_eq!(lines("WRITE 14 bytes at 14 of 65536, imm 14"), 1, "{page}");
    assert_eq!(lines("WRITE 7 bytes at 0 of 1048576, imm 7"), 3, "{page}");
    let clean = tshark(&capture(), &["-Y", "_ws.malformed || valkey_rdma.outside"]);
    assert_eq!(clean.as_deref(), Some(""));
}

#[test]
fn packets_of_a_recording_open_in_wireshark() {
    for (both, name) in [(true, "both"), (false, "client")] {
        // Longer than a packet, and than the recorded part of a request.
        let recording = record(both, Limits::default(), 6000);
        let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}.pcapng"));
        let packets = packets::save(&recording, &file).unwrap();
        let Some(page) = tshark(&file, &INFO) else { return };
        println!("{page}");
        let lines = |what: &str| page.lines().filter(|line| line.contains(what)).count();
        assert_eq!(page.lines().count(), packets);
        assert_eq!(lines("RC Send Only QP="), 4);
        assert_eq!(lines("RegisterXferMemory 4096 bytes at 0x"), 4);
        assert_eq!(lines("RC RDMA Write Only Immediate QP="), 4);
        assert_eq!(lines("WRITE 4096 bytes at 0 of 4096, full, imm 4096"), 2);
        assert_eq!(lines("WRITE 1904 bytes at 0 of 4096, imm 1904"), 2);
        assert_eq!(tshark(&file, &["-Y", "_ws.malformed || valkey_rdma.outside"]).as_deref(), Some(""));
    }
}
