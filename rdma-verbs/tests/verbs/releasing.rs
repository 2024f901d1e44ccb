use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use rdma_backend::{Backend as _, CmEventKind, EventChannel as _, Identifier as _, SendOp};

use crate::harness::{End, Lab, PARAMS, PATIENCE, Pair, event, lab, resolved};

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn resources() -> Option<String> {
    let output = Command::new("rdma").args(["resource", "show"]).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn cycle(lab: &Lab) {
    let Pair { server, client, servers, clients, listener } = lab.pair();
    client.post(SendOp::Send, 0, 32);
    client.completed();
    server.completed();
    client.id.disconnect().unwrap();
    assert!(matches!(event(&servers).kind, CmEventKind::Disconnected));
    drop((server, client, servers, clients, listener));
}

#[test]
fn connections_leave_nothing_behind() {
    let Some(lab) = lab() else { return };
    cycle(&lab);
    let before = (descriptors(), resources());
    for _ in 0..200 {
        cycle(&lab);
    }
    let after = crate::harness::await_some("the kernel's cleaning up", || {
        let after = (descriptors(), resources());
        (after == before).then_some(after)
    });
    println!("{after:?}");
}

#[test]
fn identifiers_may_go_while_their_events_are_under_way() {
    let Some(lab) = lab() else { return };
    let channel = lab.verbs.event_channel().unwrap();
    let listener = channel.listen(lab.address(), 0).unwrap();
    let remote = listener.local_addr().unwrap();
    let (channel, done) = (&channel, &AtomicBool::new(false));
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(move || {
                while !done.load(Ordering::Relaxed) {
                    drop(channel.next_event().unwrap());
                }
            });
        }
        let workers: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(move || {
                    for round in 0..300 {
                        let id = channel.create_id().unwrap();
                        id.resolve_address(None, remote, PATIENCE).unwrap();
                        if round % 3 == 0 {
                            id.local_addr();
                            id.peer_addr();
                        }
                    }
                })
            })
            .collect();
        for worker in workers {
            worker.join().unwrap();
        }
        done.store(true, Ordering::Relaxed);
    });
}

#[test]
fn connections_may_go_while_another_thread_reads_their_events() {
    let Some(lab) = lab() else { return };
    let servers = lab.verbs.event_channel().unwrap();
    let listener = servers.listen(lab.address(), 0).unwrap();
    let remote = listener.local_addr().unwrap();
    let (servers, lab, done) = (&servers, &lab, &AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(move || {
            let mut ends = Vec::new();
            while !done.load(Ordering::Relaxed) {
                let Some(event) = servers.next_event().unwrap() else { continue };
                match event.kind {
                    CmEventKind::ConnectRequest { id, .. } => {
                        let Ok(end) = End::try_new(id) else { continue };
                        if end.id.accept(&PARAMS, &[]).is_ok() {
                            ends.push(end);
                        }
                    }
                    CmEventKind::Disconnected => ends.retain(|end| end.id.key() != event.id),
                    _ => {}
                }
            }
        });
        let clients = lab.verbs.event_channel().unwrap();
        let reading = &AtomicBool::new(true);
        for round in 0..30 {
            let id = resolved(&clients, None, remote);
            let end = End::new(id);
            end.id.connect(&PARAMS, &[]).unwrap();
            // One thread reads the answer while the other destroys the queue pair.
            reading.store(true, Ordering::Relaxed);
            thread::scope(|inner| {
                inner.spawn(|| {
                    while reading.load(Ordering::Relaxed) {
                        clients.next_event().unwrap();
                    }
                });
                thread::sleep(std::time::Duration::from_micros(500 * round));
                drop(end);
                reading.store(false, Ordering::Relaxed);
            });
        }
        done.store(true, Ordering::Relaxed);
    });
}
