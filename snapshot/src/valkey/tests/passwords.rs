//! What is printed, and what never is. A type that gets a password is added here.

use super::*;
use crate::run::{Publish, Pull, Republish};
use crate::{Secret, publisher, reader};

/// All log output of this thread.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().expect("no panic").extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// No `Debug`, error or log contains a password: not the URL's, not the target's own, and not the
/// one drawn for the pull.
#[test]
fn no_password_is_printed() {
    let log = Log::default();
    let to = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_writer(move || to.clone())
        .finish();
    let mut printed = String::new();
    let mut secrets = vec![PASSWORD.to_string(), MASTERAUTH.into()];
    let secret = Secret::new(PASSWORD);
    let ours = publisher::Config { secret: secret.clone(), ..publisher::Config::default() };
    let theirs = reader::Config { secret, ..reader::Config::default() };
    let address = ([192, 0, 2, 1], 7400).into();
    let republish = Republish { address, config: ours.clone(), readers: 1, keep: LONG };
    printed += &format!("{:?} ", Publish { config: ours, ..Publish::default() });
    printed += &format!("{:?} ", Pull { config: theirs, republish: Some(republish), ..Pull::default() });
    tracing::subscriber::with_default(subscriber, || {
        for url in [
            "valkey://u:s3cret@host:port",
            "valkey://u:s3cret@host:99999999",
            "valkey://u:s3cret@",
            "valkey://u:s3cret@host/s3cret",
            "valkey://u:s3cret%ff@host",
            "valkey://u:s3cret@host?protocol=s3cret",
            "valkey://u:s3cret@[host",
            "valkeys://u:s3cret@host",
            "http://u:s3cret@host",
            "valkey+unix:///socket?pass=s3cret",
        ] {
            let error = Server::new(url).map(drop).err();
            printed += &format!("{error:?} {error:#?} ");
            printed += &error.map_or_else(String::new, |error| error.to_string());
        }
        for (refuses, password) in [
            ("nothing", PASSWORD),
            ("AUTH", PASSWORD),
            ("nothing", "s3cret-that-is-wrong"),
            ("INFO", PASSWORD),
            ("FUNCTION", PASSWORD),
            ("CONFIG", PASSWORD),
            ("CONFIG SET", PASSWORD),
            ("REPLICAOF 127", PASSWORD),
            ("REPLICAOF NO", PASSWORD),
            ("PSYNC", PASSWORD),
        ] {
            let state = State { refuses: vec![(refuses, 100)], ..State::default() };
            let fake =
                Fake::start(State { password: Some(PASSWORD), masterauth: MASTERAUTH.into(), ..state });
            let server = fake.server(password);
            let source = LiveSource::open(server.clone(), &Opening::default());
            printed += &format!("{source:?} {source:#?} ");
            printed += &source.err().map_or_else(String::new, |error| error.to_string());
            let target = Target { server, ..fake.target() };
            let stop = Stop::default();
            let mut sink = LiveSink::new(target.clone());
            sink.patience = Patience { answer: LONG, connect: Duration::ZERO, load: LONG };
            let begun =
                sink.begin(&offer(), &stop).and_then(|()| sink.write(EMPTY)).and_then(|()| sink.mark());
            printed += &format!("{sink:?} {sink:#?} {target:?} {:?} ", target.server);
            stop.stop();
            stop.stop();
            for error in [begun, sink.undo()].into_iter().filter_map(Result::err) {
                printed += &format!("{error} {error:?} ");
                let error = crate::Error::sink(error);
                printed += &format!("{error} {error:?} ");
            }
            secrets.append(&mut fake.state().told);
        }
    });
    printed += &String::from_utf8_lossy(&log.0.lock().expect("no panic"));
    assert!(printed.contains("127.0.0.1") && printed.contains("master_replid"), "{printed}");
    for secret in secrets {
        assert!(!printed.contains(&secret), "{secret}: {printed}");
    }
}
