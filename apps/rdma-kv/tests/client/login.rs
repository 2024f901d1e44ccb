use std::fmt::Debug;
use std::io::{Read, Write};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};

use crate::world::{WINDOW, client, fabric, how, over_rdma, over_tcp};
use kv_store::FrameReader;
use rdma_conn::Stream;
use rdma_kv::{Client, Error, Login, Striped, Transport};

const WRONG: &[u8] = b"-WRONGPASS invalid username-password pair or user is disabled.\r\n";
const UNKNOWN: &[u8] = b"-ERR unknown command 'AUTH', with args beginning with: 'ann' 's3cret' \r\n";

type Replies = &'static [&'static [u8]];

fn told<S: Read + Write>(replies: Replies, words: Sender<Vec<String>>) -> impl Fn(S) + Send + Sync + 'static {
    let words = Mutex::new(words);
    move |stream| {
        let mut commands = FrameReader::new(stream);
        for reply in replies {
            let Ok(Some(command)) = commands.frame() else { return };
            let command = command.into_array().expect("a command").into_iter();
            let command = command.map(|word| {
                String::from_utf8(word.into_bulk_string().expect("a word").to_vec()).expect("text")
            });
            words.lock().expect("no panic").send(command.collect()).expect("somebody listens");
            if commands.stream().write_all(reply).is_err() {
                return;
            }
        }
        let _sent = commands.stream().flush();
    }
}

fn says<T: Transport>(connect: impl Fn(Replies, Sender<Vec<String>>) -> Client<T>) {
    let login = Login::default;
    let ok: &[u8] = b"+OK\r\n";
    let cases: [(Login, Replies, &[&[&str]]); 5] = [
        (login(), &[b":7\r\n"], &[]),
        (login().password("p w"), &[b"+OK\r\n", b":7\r\n"], &[&["AUTH", "p w"]]),
        (login().user("ann", "pw"), &[b"+OK\r\n", b":7\r\n"], &[&["AUTH", "ann", "pw"]]),
        (login().database(11), &[b"+OK\r\n", b":7\r\n"], &[&["SELECT", "11"]]),
        (
            login().database(3).user("ann", ""),
            &[b"+OK\r\n", b"+OK\r\n", b":7\r\n"],
            &[&["AUTH", "ann", ""], &["SELECT", "3"]],
        ),
    ];
    for (login, replies, expected) in cases {
        assert!(replies.iter().rev().skip(1).all(|reply| *reply == ok));
        let (words, heard) = channel();
        let mut client = connect(replies, words);
        client.log_in(&login).expect("logged in");
        assert_eq!(client.strlen(b"key").expect("a length"), 7);
        for expected in expected {
            assert_eq!(heard.recv().expect("a command"), *expected);
        }
        assert_eq!(heard.recv().expect("a command"), ["STRLEN", "key"]);
    }
}

#[test]
fn a_login_says_who_and_where() {
    says(|replies, words| over_rdma(told(replies, words)));
    says(|replies, words| over_tcp(told(replies, words)));
}

/// The error names the command and has the server's words. No further command is sent.
fn refused<T: Transport + Debug>(connect: impl Fn(Replies, Sender<Vec<String>>) -> Client<T>) {
    let login = Login::default().user("ann", "s3cret").database(99);
    let cases: [(Replies, &str, &str); 4] = [
        (&[WRONG], "AUTH", "WRONGPASS"),
        (&[b"-ERR s3cret is no password\r\n"], "AUTH", "is no password"),
        (&[UNKNOWN], "AUTH", "unknown command"),
        (&[b"+OK\r\n", b"-ERR DB index is out of range\r\n"], "SELECT", "out of range"),
    ];
    for (replies, at, words) in cases {
        let (told, _heard) = channel();
        let mut client = connect(replies, told);
        let refused = client.log_in(&login).expect_err("refused");
        assert!(matches!(&refused, Error::Login { command, .. } if *command == at), "{refused}");
        let text = format!("{refused} {refused:?} {client:?}");
        assert!(text.contains(words) && text.contains(at) && !text.contains("s3cret"), "{text}");
        assert!(client.is_lost() && matches!(client.strlen(b"key"), Err(Error::Lost)));
    }
}

/// An invalid reply to a login may also contain the password.
#[test]
fn a_reply_that_is_none_is_not_repeated() {
    const NONE: [Replies; 3] = [&[b"$6\r\ns3cret\r\n"], &[b"!s3cret\r\n"], &[b"s3cret\r\n"]];
    for reply in NONE {
        let (words, _heard) = channel();
        let mut client = over_tcp(told(reply, words));
        let refused = client.log_in(&Login::default().password("s3cret")).expect_err("no reply");
        let text = format!("{refused} {refused:?} {client:?}");
        assert!(matches!(refused, Error::Unexpected(_)) && !text.contains("s3cret"), "{text}");
    }
}

#[test]
fn a_login_that_is_refused_loses_the_client() {
    refused(|replies, words| over_rdma(told(replies, words)));
    refused(|replies, words| over_tcp(told(replies, words)));
}

#[test]
fn each_of_several_connections_logs_in() {
    let (words, heard) = channel();
    let (accepted, words) = (AtomicUsize::new(0), Mutex::new(words));
    let (host, address) = fabric(3, move |stream| {
        let words = words.lock().expect("no panic").clone();
        match accepted.fetch_add(1, Ordering::Relaxed) {
            1 => told(&[WRONG], words)(stream),
            _ => told(&[b"+OK\r\n", b"$-1\r\n"], words)(stream),
        }
    });
    let connect = || client(Stream::connect_with(&host, address, &how()).expect("connects"));
    let mut client = Striped::new((0..3).map(|_| connect()).collect());
    let login = Login::default().password("pw");
    let refused = client.log_in(&login).expect_err("one is refused");
    assert!(matches!(refused, Error::Login { command: "AUTH", .. }), "{refused}");
    assert_eq!(client.connections(), 2);
    for _ in 0..3 {
        assert_eq!(heard.recv().expect("a command"), ["AUTH", "pw"]);
    }
    let mut buffer = client.buffer(2 * WINDOW).expect("registered");
    let parts = [0, 1].map(|at| rdma_kv::Part { key: b"key", range: at * WINDOW..(at + 1) * WINDOW });
    let got = client.mget_into(&parts, &mut buffer).expect("two are there");
    assert!(matches!(got[..], [Ok(None), Ok(None)]), "{got:?}");
}
