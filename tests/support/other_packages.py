"""Names of PySR 1.5's estimator, which tests do not install, from its documentation."""

#: Settings of its `PySRRegressor`, by the headings of its documentation.
PYSR_KEYWORDS = [
    *("model_selection", "binary_operators", "unary_operators", "operators", "expression_spec"),
    *("niterations", "populations", "population_size", "max_evals", "maxsize", "maxdepth"),
    *("warmup_maxsize_by", "timeout_in_seconds", "constraints", "nested_constraints"),
    *("elementwise_loss", "loss_function", "loss_function_expression", "complexity_mapping"),
    *("complexity_of_operators", "complexity_of_constants", "complexity_of_variables"),
    *("parsimony", "dimensional_constraint_penalty", "dimensionless_constants_only"),
    *("use_frequency", "use_frequency_in_tournament", "adaptive_parsimony_scaling", "alpha"),
    *("annealing", "early_stop_condition", "ncycles_per_iteration", "fraction_replaced"),
    *("fraction_replaced_hof", "fraction_replaced_guesses", "guesses", "weight_add_node"),
    *("weight_insert_node", "weight_delete_node", "weight_do_nothing", "weight_mutate_constant"),
    *("weight_mutate_operator", "weight_mutate_feature", "weight_swap_operands"),
    *("weight_rotate_tree", "weight_randomize", "weight_simplify", "weight_optimize"),
    *("crossover_probability", "skip_mutation_failures", "migration", "hof_migration", "topn"),
    *("should_simplify", "should_optimize_constants", "optimizer_algorithm"),
    *("optimizer_nrestarts", "optimizer_f_calls_limit", "optimize_probability"),
    *("optimizer_iterations", "perturbation_factor", "probability_negate_constant"),
    *("tournament_selection_n", "tournament_selection_p", "parallelism", "procs"),
    *("cluster_manager", "heap_size_hint_in_bytes", "worker_timeout", "worker_imports"),
    *("batching", "batch_size", "fast_cycle", "turbo", "bumper", "precision"),
    *("autodiff_backend", "random_state", "deterministic", "warm_start", "verbosity"),
    *("update_verbosity", "print_precision", "progress", "logger_spec", "input_stream"),
    *("run_id", "output_directory", "temp_equation_file", "tempdir", "delete_tempfiles"),
    *("update", "output_jax_format", "output_torch_format", "extra_sympy_mappings"),
    *("extra_torch_mappings", "extra_jax_mappings", "denoise", "select_k_features"),
]
#: Arguments of its ``fit``.
PYSR_FIT = [
    *("X", "y", "Xresampled", "weights", "variable_names", "complexity_of_variables"),
    *("X_units", "y_units", "category"),
]
#: Methods and attributes.
PYSR_METHODS = [
    *("fit", "predict", "sympy", "latex", "latex_table", "jax", "pytorch", "get_best", "get_hof"),
    *("refresh", "from_file", "equations_", "equation_file_contents_", "score"),
]
