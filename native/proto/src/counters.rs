//! Structs of counters that can list their fields.

/// Declares a struct of counters with a method that lists them, so that each name is written once.
#[macro_export]
macro_rules! counters {
    ($(#[$meta:meta])* pub struct $name:ident { $($(#[$field_meta:meta])* pub $field:ident: u64,)* }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        pub struct $name { $($(#[$field_meta])* pub $field: u64,)* }

        impl $name {
            /// All counters with their names, in the order of declaration.
            pub fn fields(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
                [$((stringify!($field), self.$field)),*].into_iter()
            }
        }
    };
}
