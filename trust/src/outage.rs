//! Errors that a client gets when its server, or the path to it, disappears in a reply's middle.

use std::io::Read;
use std::process::Command;
use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use rdma_conn::{Connect, Descriptors, Stream};

use crate::Outcome;
use conformance::client::{Failure, RespClient};
use conformance::workload::Entry;
use suite::Case;
use suite::resources::{self, ProcessResources};

/// A server to lose.
#[allow(missing_docs)] // the others are plain
pub struct Setting<B> {
    pub backend: B,
    /// HOST:PORT of the server.
    pub address: String,
    /// Shell command that ends the server or the path to it.
    pub command: String,
    /// How long the client may take to report the loss.
    pub within: Duration,
}

/// The suite: one case, because there is one server to lose.
pub fn cases<B: Descriptors>() -> Vec<Case<Setting<B>>> {
    vec![Case::new(
        "outage.mid-reply",
        "a client that loses its server reports the cause in time, and keeps no resources",
        &["VR-CLOSE-003", "VR-KEEP-006", "VR-RES-001"],
        mid_reply,
    )]
}

fn mid_reply<B: Descriptors>(setting: &Setting<B>, _: &ProgressBar) -> Outcome {
    let connect = || -> Result<RespClient<Stream<B>>, Failure> {
        let mut stream =
            Stream::connect_with(&setting.backend, setting.address.as_str(), &Connect::default())?;
        stream.set_read_timeout(Some(setting.within));
        stream.set_write_timeout(Some(setting.within));
        Ok(RespClient::new(stream))
    };
    let entry = Entry { number: 0, value_len: 16 << 20 };
    {
        let mut client = connect()?;
        client.send(&[b"SET", entry.key().as_bytes(), &entry.value()])?;
        client.expect("OK")?;
    }
    // After a first connection: a process makes some things only once.
    resources::settle();
    let before = ProcessResources::now();

    let mut client = connect()?;
    client.send(&[b"GET", entry.key().as_bytes()])?;
    // Most of the reply cannot have been sent: it is longer than all windows together.
    let mut received = client.stream().read(&mut [0; 1000])?;
    let done = Command::new("sh").args(["-c", &setting.command]).status()?;
    if !done.success() {
        return Err(Failure::wrong(format!("`{}` failed: {done}", setting.command)));
    }
    let begun = Instant::now();
    let report = loop {
        match client.stream().read(&mut vec![0; 1 << 20]) {
            Ok(0) => break "the end of the stream".to_string(),
            Ok(read) => received += read,
            Err(error)
                if error.kind() == std::io::ErrorKind::TimedOut && begun.elapsed() >= setting.within =>
            {
                return Err(Failure::wrong(format!("nothing was reported within {:?}", setting.within)));
            }
            Err(error) => break error.to_string(),
        }
    };
    let took = begun.elapsed();
    // The whole reply is longer than the value: it has a head and an end.
    if received > entry.value_len {
        return Err(Failure::wrong("the whole reply arrived: nothing was lost in its middle"));
    }
    drop(client);
    let after = resources::await_no_more_than(before);
    if after.exceeds(before) {
        return Err(Failure::wrong(format!("before: {before}; after: {after}")));
    }
    Ok(format!("after {received} bytes: {report} ({:.1} s; then {after}, as before)", took.as_secs_f64()))
}
