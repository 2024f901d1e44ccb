//! Asynchronous events of a device.

use super::*;
use rdma_backend::AsyncEvent;

/// All events of a side.
fn told(model: &mut Model, side: &Side) -> Vec<NoticeKind> {
    core::iter::from_fn(|| notice(model, side.channel)).collect()
}

fn only(event: AsyncEvent) -> Vec<NoticeKind> {
    vec![NoticeKind::Async(event)]
}

/// `rdma_notify(3)`: with the peer's first message its RTU is not needed any more.
#[test]
fn a_first_message_before_the_word_establishes() {
    let setup =
        Setup { parameters: Parameters { latency: millis(1), ..Parameters::default() }, ..Setup::default() };
    let mut w = World::half_open(&setup);
    w.model.accept(w.b.id, &setup.accept, &[]).unwrap();
    w.pass(millis(1));
    assert!(matches!(notice(&mut w.model, w.a.channel), Some(NoticeKind::Established(_))));
    // The RTU is in flight when the link fails. Data is retransmitted earlier than it is.
    w.model.set_link(ip(2), Link::Down);
    w.pass(millis(1));
    w.model.set_link(ip(2), Link::Up);
    for id in 0..2 {
        w.a.post(&mut w.model, id, SendOp::Write(w.b.remote(0)), 4).unwrap();
    }
    w.pass(millis(1));
    assert_eq!(told(&mut w.model, &w.b), only(AsyncEvent::CommEst));
    w.model.notify_established(w.b.id).unwrap();
    assert!(matches!(notice(&mut w.model, w.b.channel), Some(NoticeKind::Established(_))));
    assert!(w.model.notify_established(w.b.id).is_err());
    // The RTU, when it comes, causes no event.
    w.pass(setup.parameters.cm_timeout);
    assert_eq!(told(&mut w.model, &w.b), []);
    w.end();
}

/// A failing device is reported to everyone who uses it, and the connection manager reports
/// nothing.
#[test]
fn a_failed_device_is_told_to_all() {
    use crate::faults::{Fault, Injection, When};
    use crate::{DeviceKind, SimulationSettings};

    let at_once = |fault| vec![Injection { when: When::Event(0), host: 0, fault }];
    let plans = [
        (Fault::DeviceFatal, only(AsyncEvent::DeviceFatal)),
        (Fault::DeviceRemoval, vec![NoticeKind::Async(AsyncEvent::DeviceFatal), NoticeKind::DeviceRemoval]),
        (
            Fault::LinkDown { micros: 5 },
            [AsyncEvent::PortErr, AsyncEvent::PortActive].map(NoticeKind::Async).into(),
        ),
    ];
    for (fault, expected) in plans {
        let mut model = Model::simulated(SimulationState::new(
            1,
            DeviceKind::Ibta,
            SimulationSettings::default(),
            at_once(fault),
        ));
        let host = model.add_host(&[ip(1)], Limits::default());
        let channel = model.create_channel(host).unwrap();
        model.listen(channel, SocketAddr::new(ip(1), PORT), 0).unwrap();
        let other = model.create_channel(host).unwrap();
        let (id, _) = model.create_identifier(other).unwrap();
        model.resolve_address(id, None, SocketAddr::new(ip(1), PORT), millis(1)).unwrap();
        while model.step() {}
        assert_eq!(core::iter::from_fn(|| notice(&mut model, channel)).collect::<Vec<_>>(), expected);
    }
}
