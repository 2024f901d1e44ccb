//! Preparation before the clock runs: a reachable address, warmed-up connections, and keys.

use std::io::{self, ErrorKind};
use std::time::Duration;

use rdma_conn::Options;
use rdma_server::{Address, ConnectionType, EventLoop, Session, SessionId};

use crate::replies::{LONGEST_LINE, refused};
use crate::workload::{Load, Test, set};

/// How long connecting may take, at least.
pub const CONNECTING: Duration = Duration::from_secs(10);

/// Returns the first of `addresses` that accepts a connection: a server may listen on one of a
/// name's. A single address is returned untried.
///
/// # Errors
/// There are no addresses, or none accepts a connection: the error of the last one.
pub fn reachable(with: &impl ConnectionType, addresses: &[Address]) -> io::Result<Address> {
    if let [only] = addresses {
        return Ok(only.clone());
    }
    let mut failure = io::Error::new(ErrorKind::NotFound, "the name has no address");
    for address in addresses {
        let mut events = EventLoop::new(())?;
        match events.blocking_connect(with, address, None, CONNECTING) {
            Ok(_ended_by_dropping_it) => return Ok(address.clone()),
            Err(error) => failure = no_connection(address, &error),
        }
    }
    Err(failure)
}

pub(crate) fn no_connection(target: &Address, error: &io::Error) -> io::Error {
    let (target, why) = (target.to_string(), error.to_string());
    // RDMA errors already name the peer.
    let text = if why.contains(&target) { why } else { format!("no connection to {target}: {why}") };
    io::Error::new(error.kind(), text)
}

pub(crate) fn told(error: io::Error, load: &Load) -> io::Error {
    let bare = error.get_ref().is_none() && error.raw_os_error().is_none();
    match error.kind() {
        // Other time-outs explain themselves.
        kind @ ErrorKind::TimedOut if bare => {
            io::Error::new(kind, format!("no reply for {:?}", load.timeout))
        }
        ErrorKind::UnexpectedEof | ErrorKind::BrokenPipe => {
            io::Error::new(ErrorKind::UnexpectedEof, "the server ended a connection")
        }
        kind @ ErrorKind::ConnectionReset => {
            io::Error::new(kind, format!("the server ended a connection: {error}"))
        }
        _ => error,
    }
}

fn ask<S>(connection: &mut Session<S>, request: &[u8], load: &Load) -> io::Result<Vec<u8>> {
    let sent = connection.sync_write(request, load.timeout);
    // A server that rejects a client sends the reason and disconnects, possibly before the request.
    let late = matches!(&sent, Err(error) if error.kind() == ErrorKind::TimedOut);
    let patience = if late { Duration::ZERO } else { load.timeout };
    match read_line(connection, patience) {
        Err(error) if error.kind() == ErrorKind::Other => Err(error),
        line => sent.and(line).map_err(|error| told(error, load)),
    }
}

fn log_in<S>(connection: &mut Session<S>, load: &Load) -> io::Result<()> {
    load.login.say(|request| ask(connection, request, load))
}

fn read_line<S>(connection: &mut Session<S>, patience: Duration) -> io::Result<Vec<u8>> {
    let line = connection.sync_read_line(LONGEST_LINE, patience)?;
    line.strip_prefix(b"-").map_or(Ok(()), |text| Err(refused(text)))?;
    Ok(line)
}

/// Lets each connection register all its memory before the clock runs: some at its first write,
/// the rest when a long reply fills a window for the first time.
pub(crate) fn warm_up<S>(
    events: &mut EventLoop<S>,
    ids: &[SessionId],
    test: Test,
    load: &Load,
) -> io::Result<()> {
    let ask_all = |events: &mut EventLoop<S>, message: &[u8]| {
        // The test reports any other reply if it matters.
        let expected = format!("${}", message.len()).into_bytes();
        let mut request = Vec::new();
        kv_store::command(&mut request, 2, &[b"PING", message]);
        let mut rest = vec![0; message.len() + 2];
        ids.iter().try_for_each(|id| {
            let client = events.get_mut(*id).ok_or(ErrorKind::NotConnected)?;
            if ask(client, &request, load)? == expected {
                client.sync_read(&mut rest, load.timeout).map_err(|error| told(error, load))?;
            }
            Ok(())
        })
    };
    let window = Options::default().protocol.window;
    let values = load.requests.saturating_mul(load.size as u64) / load.clients.max(1) as u64;
    let fills = matches!(test, Test::Get | Test::Mixed) && values > window.into();
    for id in ids {
        log_in(events.get_mut(*id).ok_or(ErrorKind::NotConnected)?, load)?;
    }
    // All clients get the basic memory before any gets more.
    ask_all(events, b"")?;
    if fills { ask_all(events, &vec![b'x'; window as usize]) } else { Ok(()) }
}

/// Stores every key of the test, on one connection.
///
/// # Errors
/// Those of [`run`](crate::run).
pub(crate) fn store(load: &Load, (with, target): (&impl ConnectionType, &Address)) -> io::Result<()> {
    /// Bytes sent before waiting for their replies.
    const TOGETHER: usize = 1 << 20;
    let mut events = EventLoop::new(())?;
    let id = events
        .blocking_connect(with, target, None, load.connecting())
        .map_err(|error| no_connection(target, &error))?;
    log_in(events.get_mut(id).ok_or(ErrorKind::NotConnected)?, load)?;
    let value = vec![b'x'; load.size];
    let mut requests = Vec::new();
    let mut waiting = 0;
    for key in 0..load.keys {
        set(key, &value, &mut requests);
        waiting += 1;
        if requests.len() < TOGETHER && key + 1 < load.keys {
            continue;
        }
        let connection = events.get_mut(id).ok_or(ErrorKind::NotConnected)?;
        let mut line = ask(connection, &requests, load)?;
        requests.clear();
        for left in (0..std::mem::take(&mut waiting)).rev() {
            if line != b"+OK" {
                let line = String::from_utf8_lossy(&line);
                return Err(io::Error::other(format!("the server replied {line:?} to SET")));
            }
            if left > 0 {
                line = read_line(connection, load.timeout).map_err(|error| told(error, load))?;
            }
        }
    }
    events.close(id);
    events.finish()
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::TcpListener;
    use std::os::unix::net::UnixListener;

    use rdma_server::{Tcp, Unix};

    use super::*;

    /// If a server disconnects before the request, the error is its words, not the broken pipe.
    #[test]
    fn who_leaves_at_once_is_heard() {
        let path = std::env::temp_dir().join(format!("rdma-bench-leaves-{}", std::process::id()));
        let _left_by_another = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).expect("a socket");
        let target = Address::from(path.clone());
        let long = format!("DENIED {}", "because ".repeat(200));
        let load = crate::workload::tests::load();
        for (says, told) in [
            (format!("-{long}\r\n"), format!("the server replied {long:?}")),
            (String::new(), "the server ended a connection".into()),
            ("+OK\r\n".into(), "the server ended a connection".into()),
        ] {
            let mut events = EventLoop::new(()).expect("a loop");
            let id = events.blocking_connect(&Unix::new(), &target, None, CONNECTING).expect("connects");
            let (mut server, _) = listener.accept().expect("a client");
            server.write_all(says.as_bytes()).expect("there is room");
            drop(server);
            let client = events.get_mut(id).expect("it is there");
            let error = ask(client, b"PING\r\n", &load).expect_err("no reply");
            assert_eq!(error.to_string(), told);
        }
        std::fs::remove_file(path).expect("it is there");
    }

    #[test]
    fn the_addresses_of_a_name_are_tried_in_turn() {
        let [closed, open] = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").expect("a port"));
        let [nobody, somebody] = [&closed, &open].map(|one| Address::from(one.local_addr().expect("bound")));
        drop(closed);
        let found = reachable(&Tcp::new(), &[nobody.clone(), somebody.clone(), nobody.clone()]);
        assert_eq!(found.expect("one of them"), somebody);
        let error = reachable(&Tcp::new(), &[nobody.clone(), nobody.clone()]).expect_err("nobody");
        assert!(error.to_string().starts_with(&format!("no connection to {nobody}: ")), "{error}");
        assert_eq!(reachable(&Tcp::new(), &[]).expect_err("none").kind(), ErrorKind::NotFound);
        assert_eq!(reachable(&Tcp::new(), std::slice::from_ref(&nobody)).expect("not tried"), nobody);
    }
}
