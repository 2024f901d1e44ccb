//! A client whose replies are values of a server, which are freed when they are reported as
//! written. A device that reads a freed value, a byte that is reported and not released, and a
//! thread that waits for ever are failures.

use std::convert::Infallible;

use shuttle::sync::{Condvar, Mutex};
use shuttle::thread;

use super::*;

const VALUES: usize = 3;
/// A reply: a byte that is copied, two of the value, and a byte that is copied.
const REPLY: u64 = 4;
const ALL: u64 = VALUES as u64 * REPLY;

#[derive(Default)]
struct Value {
    freed: AtomicBool,
}

impl Value {
    fn free(&self) {
        self.freed.store(true, Ordering::SeqCst);
    }

    /// By a device, or by what registers it.
    fn touch(&self) {
        assert!(!self.freed.load(Ordering::SeqCst), "a value is read that is freed");
    }
}

struct Lent {
    value: Arc<Value>,
    _loan: Loan,
}

/// A connection, its endpoint and its device.
#[derive(Default)]
struct Below {
    in_flight: Vec<Arc<Lent>>,
    /// How many bytes of values the device is still to read.
    left: u64,
    aborted: bool,
    /// There may be news for the thread that writes.
    returned: bool,
}

#[derive(Clone)]
struct Connection(Arc<(Mutex<Below>, Condvar)>);

impl Connection {
    fn new() -> Self {
        let below = Below { left: VALUES as u64 * 2, ..Below::default() };
        Self(Arc::new((Mutex::new(below), Condvar::new())))
    }

    fn with<T>(&self, act: impl FnOnce(&mut Below) -> T) -> T {
        let done = act(&mut self.0.0.lock().unwrap());
        self.0.1.notify_all();
        done
    }

    fn wait_until(&self, ready: impl Fn(&Below) -> bool) {
        let mut below = self.0.0.lock().unwrap();
        while !ready(&below) && !below.aborted {
            below = self.0.1.wait(below).unwrap();
        }
    }

    /// Returns whether the connection exists.
    fn send(&self, lent: &Arc<Lent>) -> bool {
        self.with(|below| {
            let goes_on = !below.aborted;
            if goes_on {
                below.in_flight.push(Arc::clone(lent));
            }
            goes_on
        })
    }

    fn abort(&self) {
        self.with(|below| {
            below.aborted = true;
            below.in_flight.clear();
        });
    }

    /// Completions come in order from one device. These do not, so that nothing relies on it.
    fn complete(&self, which: usize) {
        loop {
            self.wait_until(|below| !below.in_flight.is_empty() || below.left == 0);
            let goes_on = self.with(|below| {
                if below.aborted || below.left == 0 {
                    return false;
                }
                let Some(last) = below.in_flight.len().checked_sub(1) else { return true };
                below.in_flight.iter().for_each(|lent| lent.value.touch());
                drop(below.in_flight.remove(which.min(last)));
                below.left -= 1;
                below.returned = true;
                true
            });
            if !goes_on {
                return;
            }
        }
    }
}

struct Client {
    loans: Mutex<Loans<Arc<Lent>>>,
    connection: Connection,
    values: [Arc<Value>; VALUES],
}

impl Client {
    /// Has the connection take two bytes, one of which is lent. Returns false if it has ended.
    fn take(&self, loans: &mut Loans<Arc<Lent>>) -> bool {
        let at = loans.accepted();
        if at % REPLY == 0 {
            let value = &self.values[usize::try_from(at / REPLY).unwrap()];
            let lent = loans.lend(at + 1..at + 3, |loan| {
                value.touch();
                Ok::<_, Infallible>(Arc::new(Lent { value: Arc::clone(value), _loan: loan }))
            });
            if lent != Ok(true) {
                return false;
            }
        }
        let Some((handle, _)) = loans.open() else { return false };
        let sent = self.connection.send(handle);
        if sent {
            loans.accept(2);
        }
        sent
    }

    /// The thread that writes, which is told that there is news.
    fn write(&self) {
        let mut reported = 0;
        while reported < ALL {
            // Cleared first, so that what comes meanwhile is not lost.
            let ended = self.connection.with(|below| {
                below.returned = false;
                below.aborted
            });
            if ended {
                return;
            }
            let mut loans = self.loans.lock().unwrap();
            if loans.accepted() < ALL && !self.take(&mut loans) {
                return;
            }
            let (news, waits) = (loans.report(u64::MAX), loans.accepted() == ALL);
            drop(loans);
            reported += news;
            for (value, end) in self.values.iter().zip((REPLY..).step_by(REPLY as usize)) {
                if end <= reported {
                    value.free();
                }
            }
            if news == 0 && waits {
                self.connection.wait_until(|below| below.returned);
            }
        }
    }

    /// The thread that frees it. The references go last.
    fn free(&self) {
        let mut loans = self.loans.lock().unwrap();
        let kept = loans.end(|| {
            self.connection.abort();
            Ok::<_, Infallible>(())
        });
        assert_eq!(kept, Ok(0), "the device keeps memory");
        drop(loans);
        self.values.iter().for_each(|value| value.free());
        // What was copied could still be delivered; a thread that writes finds an end.
        self.connection.abort();
    }
}

fn run(freed: bool) {
    let client = Arc::new(Client {
        loans: Mutex::new(Loans::new()),
        connection: Connection::new(),
        values: std::array::from_fn(|_| Arc::default()),
    });
    let mut others = Vec::new();
    for which in 0..2 {
        let connection = client.connection.clone();
        others.push(thread::spawn(move || connection.complete(which)));
    }
    let writer = Arc::clone(&client);
    others.push(thread::spawn(move || writer.write()));
    if freed {
        client.free();
    }
    for other in others {
        other.join().unwrap();
    }
    let loans = client.loans.lock().unwrap();
    assert!(freed || loans.reported() == ALL && loans.in_flight() == 0);
}

fn check(freed: bool) {
    shuttle::check_random(move || run(freed), 1000);
    shuttle::check_pct(move || run(freed), 1000, 4);
}

#[test]
fn no_byte_is_reported_before_it_is_released() {
    check(false);
}

#[test]
fn no_memory_is_touched_after_the_end() {
    check(true);
}
