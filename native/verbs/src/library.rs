//! libibverbs, loaded once.

use std::sync::OnceLock;

use crate::bindings::Verbs;

/// Name of the library: the only version of its ABI so far.
const NAME: &str = "libibverbs.so.1";

/// Returns the library, or why it cannot be loaded.
pub(crate) fn library() -> Result<&'static Verbs, &'static str> {
    static LIBRARY: OnceLock<Result<Verbs, String>> = OnceLock::new();
    // SAFETY: the library's initializers have no preconditions; it is never unloaded, so that its
    // functions stay valid.
    let load = || unsafe { Verbs::new(NAME) }.map_err(|error| error.to_string());
    LIBRARY.get_or_init(load).as_ref().map_err(String::as_str)
}
