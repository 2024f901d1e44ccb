//! The smoke suite on the embedded fabric, so that `cargo test` shows the same as the program.

use std::io::Write as _;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use conformance::smoke::{self, Scale, Setting};
use indicatif::ProgressBar;
use kv_store::{FrameReader, Store};
use rdma_conn::{Connect, Keepalive, Listener, Options};
use rdma_softsim::{Fabric, Limits, SoftSim};
use resp_rs::resp2::Frame;
use suite::{Cause, Stop, Verdict, exit};

#[test]
fn smoke() {
    let fabric = Fabric::new();
    let server = SocketAddr::from(([192, 0, 2, 1], 6379));
    let mut options = Options::default();
    options.protocol.keepalive = Some(Keepalive::NONE.every(Some(Duration::from_millis(250))));
    let listener =
        Listener::bind_with(&fabric.host(&[server.ip()]), server, options, rdma_conn::Limits::default())
            .expect("a free port");
    std::thread::spawn(move || serve(&listener));
    let connect = Connect::default();
    let scale = Scale {
        keys: 300,
        connections: 4,
        pipeline: 2000,
        busy_commands: 1500,
        idle: Duration::from_secs(1),
        cycles: 20,
        window: connect.options.protocol.window as usize,
    };
    let backend = fabric.host(&[[192, 0, 2, 2].into()]);
    let setting = Setting { backend, address: server.to_string(), connect, scale };
    let reports = suite::run(&smoke::cases(), &setting, "", |_| ProgressBar::hidden());
    let failed: Vec<String> = reports
        .iter()
        .filter(|report| report.is_failure())
        .map(|report| format!("{}: {}", report.id, report.details()))
        .collect();
    assert!(failed.is_empty(), "{} of {} cases failed:\n{}", failed.len(), reports.len(), failed.join("\n"));
}

#[test]
fn what_a_server_does_not_allow_is_not_tried() {
    let fabric = Fabric::new();
    let server = SocketAddr::from(([192, 0, 2, 1], 6379));
    let listener = Listener::bind(&fabric.host(&[server.ip()]), server).expect("a free port");
    std::thread::spawn(move || {
        while let Ok((stream, _)) = listener.accept() {
            std::thread::spawn(move || {
                let mut client = FrameReader::new(stream);
                while let Ok(Some(Frame::Array(Some(words)))) = client.frame() {
                    let reply: &[u8] = match &words[0] {
                        Frame::BulkString(Some(word)) if word == "DEBUG" => {
                            b"-ERR DEBUG command not allowed. If the enable-debug-command option is set to ...\r\n"
                        }
                        Frame::BulkString(Some(word)) if word == "BGSAVE" => {
                            b"-NOPERM User default has no permissions to run the 'bgsave' command\r\n"
                        }
                        _ => b"+PONG\r\n",
                    };
                    if client.stream().write_all(reply).is_err() {
                        break;
                    }
                }
            });
        }
    });
    let (connect, scale) = (Connect::default(), least());
    let backend = fabric.host(&[[192, 0, 2, 2].into()]);
    let setting = Setting { backend, address: server.to_string(), connect, scale };
    for (case, command) in [("smoke.busy-server", "DEBUG"), ("smoke.bgsave", "BGSAVE")] {
        let reports = suite::run(&smoke::cases(), &setting, case, |_| ProgressBar::hidden());
        let [report] = &reports[..] else { panic!("one case is called {case}") };
        assert_eq!(report.verdict(), Verdict::Skipped, "{}", report.details());
        assert!(report.details().contains(&format!("does not allow {command}")), "{}", report.details());
    }
}

fn serve(listener: &Listener<SoftSim>) {
    let store = Arc::new(Store::default());
    while let Ok((stream, _)) = listener.accept() {
        let store = Arc::clone(&store);
        // Clients of the suite disconnect in order; if not, their case reports it.
        std::thread::spawn(move || store.serve(stream));
    }
}

fn least() -> Scale {
    let idle = Duration::from_secs(1);
    let window = Options::default().protocol.window as usize;
    Scale { keys: 1, connections: 1, pipeline: 1, busy_commands: 1, idle, cycles: 1, window }
}

fn stopped(backend: SoftSim, server: SocketAddr) -> Stop {
    let (address, connect) = (server.to_string(), Connect::default());
    let setting = Setting { backend, address, connect, scale: least() };
    let mut reports = suite::run(&smoke::cases(), &setting, "", |_| ProgressBar::hidden());
    assert_eq!(reports.len(), 1);
    reports.remove(0).judged.expect_err("there is nothing to test")
}

/// Without a listener no requirement is violated: there is no target.
#[test]
fn where_nothing_listens() {
    let fabric = Fabric::new();
    let server = SocketAddr::from(([192, 0, 2, 1], 6379));
    let _there = fabric.host(&[server.ip()]);
    let stop = stopped(fabric.host(&[[192, 0, 2, 2].into()]), server);
    assert_eq!((stop.cause, stop.code()), (Cause::Refused, exit::LOST), "{}", stop.reason);
}

/// A connection that this side cannot even request shows nothing about the target.
#[test]
fn this_side_has_no_memory() {
    let fabric = Fabric::new();
    let server = SocketAddr::from(([192, 0, 2, 1], 6379));
    let _listener = Listener::bind(&fabric.host(&[server.ip()]), server).unwrap();
    let little = Limits { locked_memory: 4096, ..Limits::default() };
    let stop = stopped(fabric.host_with(&[[192, 0, 2, 2].into()], little), server);
    assert_eq!((stop.verdict, stop.code()), (Verdict::Broken, exit::BROKEN), "{}", stop.reason);
}
