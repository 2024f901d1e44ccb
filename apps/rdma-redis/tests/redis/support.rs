//! A scripted server on the embedded fabric.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::Arc;

use bytes::Bytes;
use kv_store::FrameReader;
use rdma_conn::Listener;
use rdma_softsim::{Fabric, SoftSim};
use tokio::sync::mpsc;

pub(crate) const URL: &str = "valkey+rdma://192.0.2.1:6379";

pub(crate) enum Answer {
    Say(&'static str),
    Nothing,
    Leave,
}

/// A command that arrived, in upper case, and the number of its connection, from 0.
#[derive(Debug, PartialEq)]
pub(crate) struct Seen {
    pub(crate) connection: usize,
    pub(crate) command: String,
}

pub(crate) fn address() -> SocketAddr {
    SocketAddr::from(([192, 0, 2, 1], 6379))
}

pub(crate) fn fabric(
    answer: impl Fn(usize, &str) -> Answer + Send + Sync + 'static,
) -> (Fabric, SoftSim, mpsc::UnboundedReceiver<Seen>) {
    let fabric = Fabric::new();
    let seen = serve(&fabric.host(&[address().ip()]), answer);
    let client = fabric.host(&[[192, 0, 2, 2].into()]);
    (fabric, client, seen)
}

pub(crate) fn serve(
    host: &SoftSim,
    answer: impl Fn(usize, &str) -> Answer + Send + Sync + 'static,
) -> mpsc::UnboundedReceiver<Seen> {
    let listener = Listener::bind(host, address()).expect("a free address");
    serve_all(move || listener.accept().ok().map(|(stream, _)| stream), answer)
}

pub(crate) fn serve_tcp(
    answer: impl Fn(usize, &str) -> Answer + Send + Sync + 'static,
) -> (u16, mpsc::UnboundedReceiver<Seen>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
    let port = listener.local_addr().expect("bound").port();
    (port, serve_all(move || listener.accept().ok().map(|(stream, _)| stream), answer))
}

fn serve_all<S: Read + Write + Send + 'static>(
    accept: impl Fn() -> Option<S> + Send + 'static,
    answer: impl Fn(usize, &str) -> Answer + Send + Sync + 'static,
) -> mpsc::UnboundedReceiver<Seen> {
    let (tell, seen) = mpsc::unbounded_channel();
    let answer = Arc::new(answer);
    std::thread::spawn(move || {
        for connection in 0.. {
            let Some(stream) = accept() else { return };
            let (answer, tell) = (Arc::clone(&answer), tell.clone());
            std::thread::spawn(move || session(stream, connection, &*answer, &tell));
        }
    });
    seen
}

fn session(
    stream: impl Read + Write,
    connection: usize,
    answer: &dyn Fn(usize, &str) -> Answer,
    tell: &mpsc::UnboundedSender<Seen>,
) -> std::io::Result<()> {
    let mut reader = FrameReader::new(stream);
    while let Some(command) = reader.frame()? {
        let words = command.into_array().unwrap_or_default().into_iter();
        let words: Vec<Bytes> = words.filter_map(|word| word.into_bulk_string().ok()).collect();
        let command = String::from_utf8_lossy(&words.join(&b' ')).to_uppercase();
        let _test_is_over = tell.send(Seen { connection, command: command.clone() });
        match answer(connection, &command) {
            Answer::Say(reply) => reader.stream().write_all(reply.as_bytes())?,
            Answer::Nothing => {}
            Answer::Leave => return Ok(()),
        }
    }
    Ok(())
}

pub(crate) fn polite(command: &str) -> Answer {
    match command {
        hello if hello.starts_with("HELLO 3") => Answer::Say("%1\r\n$6\r\nserver\r\n$4\r\ntest\r\n"),
        setup if setup.starts_with("CLIENT") || setup.starts_with("SELECT") => Answer::Say("+OK\r\n"),
        "PING" => Answer::Say("+PONG\r\n"),
        "ECHO END" => Answer::Say("+end\r\n"),
        _ => Answer::Nothing,
    }
}
