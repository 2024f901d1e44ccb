//! Prints the public API that a file of rustdoc's JSON describes, one item a line, without implementations that follow from the
//! type (auto traits, blanket and derived ones).

use std::process::ExitCode;

fn main() -> ExitCode {
    let Some(json) = std::env::args_os().nth(1) else {
        eprintln!("usage: api-listing RUSTDOC.json");
        return ExitCode::from(2);
    };
    let listing = public_api::Builder::from_rustdoc_json(json)
        .omit_auto_trait_impls(true)
        .omit_blanket_impls(true)
        .omit_auto_derived_impls(true)
        .build();
    match listing {
        Ok(api) => {
            print!("{api}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
