//! The suite of verbs semantics on the embedded fabric: the simulator keeps the rules of RDMA.

use crate::programs;

#[test]
fn the_embedded_fabric_keeps_to_the_book() {
    let told = programs(&[vec!["semantics"]]).concat();
    let cases = rdma_semantics::cases::<rdma_softsim::SoftSim>().len();
    assert!(told.contains(&format!("verbs semantics of softsim: {cases} passed, 0 failed")), "{told}");
}
