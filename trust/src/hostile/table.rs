//! How cases are written down.

/// A list of cases, in lines of: who can meet the deviation (`server` or `client` of ours, or `both`), its name, what it
/// is, the requirements, the options of our side, and the body, a `fn(&Scene<B>, Side) -> Outcome`.
macro_rules! cases {
    ($($who:ident $name:literal, $intent:literal, [$($requirement:literal),+], $options:expr => $body:expr;)+) => {{
        let mut cases = Vec::new();
        $(cases.extend($who!($name, $intent, [$($requirement),+], $options, $body));)+
        cases
    }};
}

macro_rules! both {
    ($name:literal, $intent:literal, $requirements:expr, $options:expr, $body:expr) => {
        server!($name, $intent, $requirements, $options, $body).into_iter().chain(client!(
            $name,
            $intent,
            $requirements,
            $options,
            $body
        ))
    };
}

macro_rules! server {
    ($name:literal, $intent:literal, $requirements:expr, $options:expr, $body:expr) => {
        [$crate::Case::new(concat!("hostile.server.", $name), $intent, &$requirements, |setting, _| {
            $crate::hostile::scene::play(setting, $options, |scene| ($body)(scene, Side::Server))
        })]
    };
}

macro_rules! client {
    ($name:literal, $intent:literal, $requirements:expr, $options:expr, $body:expr) => {
        [$crate::Case::new(concat!("hostile.client.", $name), $intent, &$requirements, |setting, _| {
            $crate::hostile::scene::play(setting, $options, |scene| ($body)(scene, Side::Client))
        })]
    };
}

/// Whether an error of a connection is of this kind.
macro_rules! is {
    ($pattern:pat) => {
        |error: &rdma_conn::Error| matches!(error, $pattern)
    };
}
