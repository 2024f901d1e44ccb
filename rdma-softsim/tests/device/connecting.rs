//! The connection manager on queue pairs of the device.

use super::*;

/// Private data reaches the other side, padded to its field. Once a program has taken all its
/// completions, its peer ends the connection in the middle of nothing.
#[test]
fn the_connection_manager_connects_queue_pairs_of_the_device_and_brings_private_data() {
    let fabric = Fabric::new();
    // From here on, failures are counted.
    fabric.seed_faults(1);
    let [a, b] = [1, 2].map(|last| fabric.host(&[address(last)]));
    let (active, passive) = (end(&a), end(&b));
    let listening = b.event_channel_with(CountingSignal::new()).unwrap();
    let listener = listening.create_id().unwrap();
    listener.bind((address(2), 0).into()).unwrap();
    listener.listen(0).unwrap();
    let channel = a.event_channel_with(CountingSignal::new()).unwrap();
    let id = channel.create_id().unwrap();
    id.resolve_address(None, listener.local_addr().unwrap(), Duration::from_secs(1)).unwrap();
    assert!(channel.next_event().unwrap().is_some());
    id.resolve_route(Duration::from_secs(1)).unwrap();
    assert!(channel.next_event().unwrap().is_some());
    assert!(id.connect_pair(&active.pair, &PARAMS, &[]).is_err(), "from INIT only");
    for end in [&active, &passive] {
        end.pair.modify(Transition::Initialise).unwrap();
    }
    id.connect_pair(&active.pair, &PARAMS, b"hello").unwrap();
    let told = listening.next_event().unwrap().unwrap();
    assert_eq!((told.private_data.len(), &told.private_data[..6]), (56, &b"hello\0"[..]));
    let CmEventKind::ConnectRequest { id: child, .. } = told.kind else { panic!("a request") };
    child.accept_pair(&passive.pair, &PARAMS, b"welcome").unwrap();
    let told = channel.next_event().unwrap().unwrap();
    assert!(matches!(told.kind, CmEventKind::Established { .. }));
    assert_eq!((told.private_data.len(), &told.private_data[..8]), (196, &b"welcome\0"[..]));
    passive.pair.post_named_receives(&[NamedReceive { id: 2, local: &[passive.sge(0, 64)] }]).unwrap();
    let inline = NamedSend {
        id: 1,
        op: SendOp::Send.into(),
        local: Local::Inline(b"inline"),
        signaled: false,
        solicited: false,
    };
    active.pair.post_named(&[inline]).unwrap();
    assert_eq!(passive.completions(), [Ok(Completed::Recv { len: 6, immediate: None })]);
    assert_eq!(&passive.program.bytes.lock().unwrap()[..6], b"inline");
    let to = RemoteAddress { address: BASE, rkey: active.region.key() };
    passive.post(SendOp::Write(to), passive.sge(0, 8));
    assert_eq!(passive.shown.take().len(), 1);
    id.disconnect().unwrap();
    assert_eq!(fabric.failure_counts().injected(FailureClass::DisconnectMidWrite), 0);
}
