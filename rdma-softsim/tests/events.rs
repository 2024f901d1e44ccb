//! Connection-manager events as they are logged. `rdma-proto` has no identifier to log one with.

use rdma_backend::{AsyncEvent, Backend, CmEventKind, ConnectParams, EventChannel, Identifier};
use rdma_softsim::{Fabric, SoftSim};

#[test]
fn events_name_themselves() {
    type Kind = CmEventKind<SoftSim>;
    let channel = Fabric::new().host(&[]).event_channel().unwrap();
    let peer =
        ConnectParams { responder_resources: 1, initiator_depth: 2, retry_count: 3, rnr_retry_count: 4 };
    let params =
        "ConnectParams { responder_resources: 1, initiator_depth: 2, retry_count: 3, rnr_retry_count: 4 }";
    for (kind, shown) in [
        (Kind::AddressResolved, "AddressResolved".into()),
        (Kind::AddressError { status: -1 }, "AddressError(-1)".into()),
        (Kind::RouteResolved, "RouteResolved".into()),
        (Kind::RouteError { status: -2 }, "RouteError(-2)".into()),
        (Kind::Established { peer }, format!("Established({params})")),
        (Kind::ConnectError { status: -3 }, "ConnectError(-3)".into()),
        (Kind::Unreachable { status: -110 }, "Unreachable(-110)".into()),
        (Kind::Rejected { reason: 28 }, "Rejected(28)".into()),
        (Kind::Disconnected, "Disconnected".into()),
        (Kind::TimewaitExit, "TimewaitExit".into()),
        (Kind::DeviceRemoval, "DeviceRemoval".into()),
        (Kind::AddressChange, "AddressChange".into()),
        (Kind::Async(AsyncEvent::QpFatal), "Async(QpFatal)".into()),
        (Kind::Other(99), "Other(99)".into()),
    ] {
        assert_eq!(format!("{kind:?}"), shown);
        // Only a request has an identifier for a wrapping backend to convert.
        let wrapped: Kind = kind.map_identifier(|_| unreachable!("{shown} has an identifier"));
        assert_eq!(format!("{wrapped:?}"), shown);
    }
    let request = Kind::ConnectRequest { id: channel.create_id().unwrap(), peer };
    let shown = format!("{request:?}");
    assert!(
        shown.starts_with("ConnectRequest(IdentifierKey(") && shown.ends_with(&format!("{params})")),
        "{shown}"
    );
    let other = channel.create_id().unwrap();
    let key = other.key();
    let wrapped: Kind = request.map_identifier(|_| other);
    assert!(format!("{wrapped:?}").starts_with(&format!("ConnectRequest({key:?}")), "{wrapped:?}");
}
