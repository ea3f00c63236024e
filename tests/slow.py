# ruff: noqa: E501
"""Tests that `make test` leaves to `make test-all`: they take long, and faster tests usually find the same faults.

A key is a test, one case of it, or a file. A value is the number of cases of a test that stay in `make test`, spread
evenly over all cases; 0 leaves out all of them. `tests/house/test_slow.py` checks the names. Seconds, in comments, are of a
processor (2026-11-25; those of 2026-11-26 on a crowded machine), or of a run on two busy cores (2026-11-24).
"""


class First(int):
    """A number of cases that stay: the first ones, which a test puts there for that."""


SLOW: dict[str, int] = {
    # The engine: its laws have faster tests of their own.
    "tests/serving/test_serving_laws.py::test_log_probabilities_of_any_requests_add_up": 0,  # 7
    "tests/serving/test_scheduler_mutants.py::test_every_mutant_is_found_out": 8,  # 70 in 3 minutes
    "tests/serving/test_scheduler_mutants.py::test_the_right_one_passes": 0,  # 10: 12,000 steps
    "tests/serving/test_scheduler.py::test_memory_is_flat_after_10_000_requests": 0,  # 20
    "tests/serving/test_serving_laws.py::test_in_any_company_as_alone": 0,  # 50: four models are compiled
    "tests/serving/test_serving_laws.py::test_in_company_as_alone": 1,  # 4 each
    "tests/serving/test_serving_laws.py::test_a_text_is_that_of_one_sequence": 0,  # 13
    "tests/serving/test_serve_command.py::test_sigterm_under_load_lets_everybody_finish": 0,  # 25
    "tests/serving/test_serve_command.py::test_lm_eval_finds_what_our_own_evaluation_finds": 0,  # 20, where lm-eval is
    "tests/benchmarks/test_bench_serve.py::test_a_model_is_measured": 0,  # 8
    # The GPU suites and the tables of kernels. `make gates` and the suites themselves cover these as well.
    "tests/benchmarks/test_routed_cases.py::test_every_kernel_of_a_published_llama_is_a_case": 1,  # 1 each
    "tests/benchmarks/test_bench_gpu.py::test_a_model_draws_as_many_tokens_a_call_as_a_session_would": 0,  # 3
    "tests/benchmarks/test_bench_gpu.py::test_cases_are_left_out_when_time_is_over_whether_compiled_or_not": 2,  # 1 each
    "tests/benchmarks/test_bench_gpu.py::test_every_tile_of_several_chunks_is_held_to_exact_numbers": 0,  # 3
    "tests/benchmarks/test_decode_steps.py::test_a_step_is_a_burst_of_the_model": 5,  # 18 in 9
    "tests/benchmarks/test_bench_gpu.py::test_a_dry_run_shows_that_the_suite_works_and_says_that_it_means_nothing": 0,  # 87
    "tests/benchmarks/test_bench_gpu.py::test_no_query_sees_what_is_before_its_window": 0,  # 13
    "tests/benchmarks/test_bench_gpu.py::test_tiles_are_timed": 0,  # 5
    "tests/benchmarks/test_bench_gpu.py::test_kernels_are_checked_and_what_does_not_fit_is_named": 0,  # 6
    "tests/benchmarks/test_bench_gpu.py::test_a_part_that_dies_takes_nothing_with_it_but_itself": 1,  # 5 each
    "tests/benchmarks/test_bench_cases.py::test_every_op_of_the_table_has_hard_inputs_or_needs_none": 0,  # 9
    "tests/benchmarks/test_bench_cases.py::test_the_plain_form_is_within_the_bound": 4,
    "tests/benchmarks/test_routed_cases.py::test_each_pair_of_features_that_meet_in_a_kernel_meets_in_a_case": 0,  # 27
    "tests/kernels/test_lowering.py::test_a_case_of_the_table_lowers_for_an_h200": 6,  # 74 in all
    "tests/benchmarks/test_bench_cases.py::test_a_kernel_and_xla_give_the_same_arrays": 12,  # 34 in 2
    # Whole steps of kernels in the interpreter. Each kernel has faster tests of its own.
    "tests/model/ops/test_ops_choice.py::test_a_bug_in_a_kernel_is_loud_and_no_plain_form": 3,  # 9 in 4
    "tests/model/ops/test_ops_choice.py::test_every_type_of_a_gguf_file_runs_by_kernels": 4,  # 10 in 2
    "tests/benchmarks/test_code_forms.py::test_a_file_of_mixed_types_runs_by_kernels_alone": 1,  # 1 each
    "tests/kernels/test_attention_decode.py::test_large_scores": 1,  # 1 each
    "tests/model/ops/test_ops_choice.py::test_a_field_that_is_harmless_to_an_op_does_not_change_its_plain_form": First(
        5
    ),  # 39 in 12
    "tests/kernels/test_paged_step.py::test_attention_is_that_of_the_plain_form": 1,  # 5 each
    "tests/kernels/test_quantized_step.py::test_q_k_and_v_of_two_forms_are_one_kernel": 0,  # 5
    "tests/kernels/test_quantized_step.py::test_kernels_multiply_by_the_weights_of_the_file": 7,  # 42 in 7
    "tests/kernels/test_integer_mma.py::test_threads_multiply_what_belongs_together": 60,  # 460 in 9
    "tests/kernels/test_gemv.py::test_a_position_outside_of_the_cache_is_taken_for_the_nearest": 1,  # 1 each
    "tests/kernels/test_attention_decode.py::test_a_ring_that_wraps_twice": 1,  # 1 each
    "tests/kernels/test_attention_decode.py::test_every_length_that_is_an_edge": 1,  # 1 each
    "tests/kernels/test_attention_decode.py::test_extremes": 1,  # 1 each
    "tests/kernels/test_attention_paged.py::test_a_ring_that_wraps_twice": 1,  # 1 each
    "tests/kernels/test_attention_prefill.py::test_an_offset_outside_of_the_cache_is_clamped": 1,  # 1 each
    "tests/kernels/test_attention_prefill.py::test_extremes": 1,  # 1 each
    "tests/kernels/test_quantized_step.py::test_the_text_is_that_of_the_plain_form": 0,  # 33
    "tests/kernels/test_quantized_step.py::test_every_op_of_a_step_is_within_its_bound_by_kernels_and_plain": 0,  # 24
    "tests/kernels/test_decode_step.py::test_a_prompt_and_what_follows_are_those_of_the_plain_form": 0,  # 20
    "tests/kernels/test_decode_step.py::test_every_op_of_a_chunk_and_of_a_step_is_within_its_bound": 0,  # 7 to 12 each
    "tests/kernels/test_whole_steps.py::test_a_chunk_and_greedy_steps_after_it": 0,  # 9 and 19
    "tests/kernels/test_gemv.py::test_norm_gate_up": 0,  # 12
    "tests/kernels/test_gemv.py::test_norm_qkv": 0,  # 11
    "tests/kernels/test_gemv_quantized.py::test_product": 0,  # 18
    "tests/kernels/test_gemv_quantized.py::test_norm_bias_and_residual": 0,  # 10
    "tests/kernels/test_gemv_quantized.py::test_a_unit_vector_gives_a_column_and_its_scales": 1,  # 2 to 3 each
    "tests/kernels/test_fused_quantized.py::test_norm_gate_up": 0,  # 6
    "tests/kernels/test_fused_quantized.py::test_norm_qkv": 0,  # 9
    "tests/kernels/test_fused_quantized.py::test_biases_are_added_to_their_rows": 1,  # 3 each
    "tests/kernels/test_attention_prefill.py::test_every_shape_at_the_end_of_the_cache": 1,  # 3 to 5 each
    "tests/kernels/test_attention_decode.py::test_every_shape_around_a_tile": 1,
    "tests/kernels/test_attention_paged.py::test_every_page_size": 1,
    "tests/kernels/test_several_vectors.py::test_each_of_several_vectors_has_what_it_has_alone": 1,
    "tests/kernels/test_attention_prefill.py::test_a_ring_that_wraps_twice": 1,  # 2 each
    "tests/kernels/test_attention_prefill.py::test_the_edge_of_what_needs_no_mask": 1,  # 1 to 2 each
    "tests/kernels/test_attention_prefill.py::test_sequences_that_no_worker_is_full_of": 1,  # 2 each
    "tests/kernels/test_whole_steps.py::test_the_bound_tells_a_wrong_step": 1,  # 1 to 2 each
    "tests/model/ops/test_ops_choice.py::test_kernels_say_unsupported_of_all_that_they_do_not_take": 0,  # 10
    "tests/kernels/test_decode_step.py::test_what_the_kernels_refuse": 0,  # 11
    "tests/house/test_releases.py::test_the_table_of_releases_is_up_to_date": 0,  # 15
    "tests/kernels/test_coded_gemm.py::test_an_op_whose_kernel_refuses_a_model_multiplies_as_kernels_do": 6,  # 18 in 3
    "tests/kernels/test_coded_gemm.py::test_a_step_of_several_sequences_multiplies_by_codes_at_once": 7,  # 14 in 5
    # What `make verify` does as well, and derivatives by JAX that take long.
    "tests/verify/test_verify_loose.py::test_a_right_function_is_right_by_the_weaker_contract_too": 2,  # 1 each
    "tests/verify/test_verify_loose.py::test_plain_code_is_within_the_weaker_contract_alone": 2,  # 1 each
    "tests/verify/test_verify_others.py::test_triton_kernels_of_jax": 2,  # 1 each
    "tests/verify/test_verify_walk.py::test_sinks_and_biased_experts_are_walked_through": 0,  # 4
    "tests/verify/test_verify_ours.py::test_kernels": 4,  # 1 each
    "tests/verify/test_verify_others.py::test_functions_of_jax": 4,  # 1 each
    "tests/verify/test_verify_ours.py::test_plain_ops": 4,  # 1 each
    "tests/verify/test_verify_mutants.py::test_right_implementations_pass": 0,  # 13
    "tests/verify/test_verify_kernelbench.py::test_a_right_one_is_within_bounds": 1,  # 1 and 7
    "tests/verify/test_verify_narrowed.py::test_a_causal_kernel_is_right_where_the_mask_is_causal_and_wrong_elsewhere": 0,
    "tests/verify/test_verify_sizes.py::test_rows_beyond_4096_are_found_at_default_settings": 2,  # 1 to 2 each
    "tests/verify/test_verify_declare.py::test_an_example_accepts_its_right_function": 5,  # 9 in 6
    "tests/verify/test_verify_loose.py::test_the_mutants_that_live_are_those_that_claim_less": 1,  # 2 to 3 each
    "tests/verify/test_verify_endings.py::test_a_signal_ends_a_run_without_a_verdict": 3,  # 6 in 5
    # Each op stays in one dtype, swiglu in both.
    "tests/verify/test_verify_backward.py::test_automatic_differentiation_is_within_bounds[linear_backward-float32]": 0,  # 2
    "tests/verify/test_verify_backward.py::test_automatic_differentiation_is_within_bounds[rmsnorm_backward-float32]": 0,  # 3
    "tests/verify/test_verify_backward.py::test_automatic_differentiation_is_within_bounds[embedding_backward-bfloat16]": 0,
    "tests/verify/test_verify_backward.py::test_automatic_differentiation_is_within_bounds[cross_entropy_backward-float32]": 0,
    "tests/verify/test_verify_backward.py::test_automatic_differentiation_is_within_bounds[attention_backward-float32]": 0,
    "tests/verify/test_verify_mutants.py::test_every_mutant_is_found_out[long ops]": 0,  # 70
    "tests/verify/test_verify_backward.py::test_automatic_differentiation_is_within_bounds[attention_backward-bfloat16]": 0,
    # The server: a browser, and clients that stall.
    "tests/learn/test_xray_page.py": 0,  # 20, with a browser; its data have tests/learn/test_xray.py
    "tests/serving/test_serving_page.py::test_regenerate_edit_and_the_same_seed": 0,  # 5
    "tests/serving/test_serving_page.py::test_settings_reach_the_engine_and_history_is_kept": 0,  # 3
    "tests/serving/test_serving_page.py::test_a_narrow_screen_has_no_sideways_scrolling": 1,  # 3 each
    "tests/model/test_stories_model.py::test_what_help_suggests_to_ask_is_answered": 2,  # 1 each
    "tests/serving/test_serving_grammar.py::test_an_answer_keeps_to_its_schema": 3,  # 1 each
    "tests/serving/test_serving_faults.py::test_a_reader_that_stops_reading_is_dropped_and_nobody_else_waits": 0,  # 3
    # Memory and machines, measured in processes of their own.
    "tests/benchmarks/test_bench.py::test_a_token_costs_what_inspect_says": 4,  # 12 in 4
    "tests/house/test_wheel.py::test_the_command_works_from_an_empty_environment": 0,  # 43
    "tests/model/insight/test_plan.py::test_this_machine_is_measured_for_a_plan": 0,  # 28
    "tests/model/insight/test_plan.py::test_a_first_run_takes_the_memory_that_was_planned": 0,  # 8 to 17 each
    "tests/model/insight/test_plan.py::test_the_reference_takes_the_memory_that_loading_checks": 0,  # 10
    "tests/model/running/test_programs.py::test_weights_are_in_memory_once": 0,  # 13
    "tests/model/running/test_programs.py::test_the_end_of_a_long_cache_takes_no_more_memory": 0,  # 5
    "tests/model/running/test_process_memory.py::test_it_can_be_measured_again": 0,  # 6
    "tests/benchmarks/test_bench.py::test_how_it_changes_as_the_work_grows": 0,  # 8
    "tests/benchmarks/test_bench_serve.py::test_the_built_in_model_is_loaded_by_a_server_of_its_own": 0,  # 10
    "tests/benchmarks/test_bench.py::test_what_a_cache_holds_has_no_share_of_what_memory_gives": 0,  # 7
    "tests/benchmarks/test_bench.py::test_a_story_ends_with_what_it_read_a_second": 0,  # 4 each
    "tests/benchmarks/test_bench.py::test_the_speed_of_a_model": 0,  # 10
    "tests/model/insight/test_plan.py::test_a_plan_over_the_memory_at_hand_says_so": 0,  # 5
    "tests/model/insight/test_profile.py::test_a_model_is_profiled": 0,  # 6
    "tests/model/checkpoints/test_bounded.py::test_a_limit_is_one": 1,  # 6 to 8 each
    # Commands in processes of their own, as README shows them or stopped late. Those stopped early stay.
    "tests/model/running/test_starts.py::test_phases_are_said_only_where_they_are_asked_for": 0,  # 5
    "tests/model/running/test_programs.py::test_both_backends_tell_the_same_story": 0,  # 3
    "tests/commands/test_cli.py::test_chat_takes_commands": 0,  # 8
    "tests/commands/test_llamaspec.py::test_the_examples_run": 0,  # 8
    "tests/serving/test_serve_command.py::test_a_fingerprint_changes_with_whatever_a_text_depends_on": 0,  # 13
    "tests/learn/test_xray.py::test_a_large_model_fits_the_page": 1,  # 1 each
    "tests/learn/test_xray.py::test_every_scheme_has_a_row_of_every_matrix": 1,  # 1 each
    "tests/model/running/test_programs.py::test_what_decodes_otherwise_is_compiled_once_and_when_it_is_needed": 1,  # 2 each
    "tests/model/running/test_memory.py::test_only_a_process_of_the_models_own_is_changed": 1,  # 2 each
    "tests/commands/test_cli.py::test_doctor_for_a_program": 0,  # 8
    "tests/commands/test_interrupts.py::test_ctrl_c_ends_a_command_in_the_phase_that_it_shows": 2,  # 1 each
    "tests/learn/test_lab.py::test_an_empty_function_is_refused_and_a_right_one_accepted": 2,  # 1 each
    "tests/verify/test_verify_triton.py::test_what_is_drawn_and_found_is_what_the_guide_shows": 1,  # 2 each
    "tests/model/running/test_system.py::test_a_model_tells_the_same_without_linux": 0,  # 11
    "tests/model/running/test_system.py::test_commands_run_without_linux": 0,  # 17
    "tests/learn/test_lab.py::test_an_exercise_is_begun_checked_and_solved_in_a_terminal": 0,  # 17
    "tests/learn/test_lab.py::test_the_test_in_the_folder_says_the_same": 0,  # 8 and 2
    "tests/house/test_documents.py::test_a_shown_session_is_what_comes_out": 0,  # 10
    "tests/model/running/test_starts.py::test_other_shapes_settings_and_environments_are_other_programs": 0,  # 11
    "tests/model/running/test_starts.py::test_chat_says_the_phases_of_its_first_answer": 0,  # 7
    "tests/model/running/test_starts.py::test_the_programs_that_were_not_used_for_longest_are_removed": 0,  # 6
    "tests/model/running/test_starts.py::test_a_program_that_was_cut_short_is_compiled_anew": 0,  # 5 each
    "tests/model/running/test_programs.py::test_a_command_compiles_the_one_that_it_decodes_by": 0,  # 4 to 7 each
    "tests/house/test_documents.py::test_a_command_that_needs_no_download_runs": 0,  # 9
    "tests/verify/test_verify_ours.py::test_tanh_is_within_its_bound_for_every_float32": 1,  # 10: all of them
    "tests/verify/test_verify_cli.py::test_the_guide_shows_what_is_printed": 0,  # 12
    "tests/verify/test_verify_cli.py::test_the_guide_walks_from_python": 0,  # 3
    "tests/benchmarks/test_peers.py::test_a_tiny_run_shows_that_it_works": 0,  # 7
    "tests/model/running/test_process.py::test_a_command_prepares_its_process_before_jax_is_imported": 0,  # 3 to 10 each
    "tests/model/running/test_process.py::test_a_program_that_was_cut_short_is_replaced_in_silence": 1,  # 2 each
    "tests/house/test_documents.py::test_python_runs_and_prints_prompt_and_text": 0,  # 8
    "tests/commands/test_cli.py::test_chat_drops_what_no_longer_fits_and_says_so": 0,  # 9
    "tests/commands/test_cli.py::test_chat_refuses_a_command_by_name": 1,  # 2 each
    "tests/commands/test_interrupts.py::test_a_request_to_end_is_answered_at_once": 1,  # 5
    "tests/commands/test_interrupts.py::test_an_interrupt_is_answered_at_once": First(
        10
    ),  # the earliest of each command
    # A form, type or scheme after the other: a few stay.
    "tests/model/tokenizers/test_tokenizer_json.py::test_a_part_that_cannot_be_followed_is_refused": 4,  # 12 in 9
    "tests/model/ops/test_quantized_products.py::test_every_kind_is_multiplied_as_one_token_needs_it": 10,  # 28 in 6
    "tests/model/insight/test_checkup.py::test_a_text_in_another_language_names_nothing": 0,  # 4
    "tests/model/chat/test_chat_template.py::test_a_harmful_template_is_one_line_and_soon": 8,  # 19 in 6
    "tests/model/checkpoints/test_quantized_checkpoints.py::test_a_layout_means_the_weights_of_its_owner": 8,  # 20 in 4
    "tests/model/checkpoints/gguf/test_gguf_codes.py::test_no_matrix_is_float32_on_the_device": 5,  # 14 in 3
    "tests/model/ops/test_cpu_attention.py::test_both_cores_read_the_cache": 1,  # 1 each
    "tests/model/insight/test_eval.py::test_logits_in_parts_are_the_logits": 1,  # 2 each
    "tests/model/running/test_process_memory.py::test_plans_are_made_with_what_was_measured": 6,  # 18 in 3
    "tests/model/quantize/test_quantizing.py::test_codes_and_scales_are_the_references": 12,  # 24 in 6
    "tests/model/checkpoints/gguf/test_gguf_codes.py::test_codes_stand_for_the_weights_bit_for_bit": 3,  # 14 in 10
    "tests/model/checkpoints/gguf/test_gguf_goldens.py::test_logits_are_near_those_of_llama_cpp": 4,  # 17 in 8
    "tests/model/families/test_gpt_oss.py::test_sinks_are_within_the_bound_in_every_form": 3,  # 10 in 6
    "tests/model/families/test_family_goldens.py::test_jax_has_the_logits_and_the_text_of_transformers": First(
        9
    ),  # 1 to 2 each
    "tests/model/test_forward.py::test_logits_are_those_of_transformers": 14,  # 30 in 16
    "tests/model/insight/test_eval_emulation.py::test_logits_are_those_of_llama_cpp": 6,  # 15 in 8
    "tests/model/checkpoints/gguf/test_gguf_by_llama_cpp.py::test_logits_are_those_of_llama_cpp": 6,  # 23 in 6
    "tests/model/checkpoints/gguf/test_gguf_by_llama_cpp.py::test_the_command_line_evaluates_as_llama_cpp_predicts": 1,  # 1 each
    "tests/model/quantize/test_calibration.py::test_what_is_multiplied_here_is_divided_there": 3,  # 10 in 7
    "tests/model/quantize/test_calibration.py::test_gptq_in_blocks_of_columns_is_gptq": 3,  # 9 in 3
    "tests/model/quantize/test_calibration.py::test_the_activations_of_one_layer_are_in_memory_at_a_time": 1,  # 1 each
    "tests/model/ops/test_decode_hlo.py::test_products_run_on_all_cores_and_copy_no_weight": 1,  # 4 to 9 each
    "tests/model/checkpoints/gguf/test_gguf_codes.py::test_logits_are_those_of_the_reference": 1,  # 5 to 8 each
    "tests/model/checkpoints/gguf/test_gguf_codes.py::test_kernels_leave_rows_that_are_too_short_to_the_plain_form": 1,  # 1 to 2 each
    "tests/model/checkpoints/gguf/test_gguf_codes.py::test_the_text_is_that_of_the_weights_in_float32": 0,  # 5 each
    "tests/model/checkpoints/gguf/test_gguf_by_llama_cpp.py::test_jax_computes_what_the_reference_does": 1,  # 4 each
    "tests/model/checkpoints/gguf/test_gguf_goldens.py::test_the_story_is_that_of_llama_cpp": 1,  # 2 to 7 each
    "tests/model/checkpoints/gguf/test_gguf_cli.py::test_both_backends_compute_the_same": 0,  # 5 each
    "tests/model/insight/test_eval_emulation.py::test_jax_emulates_too": 1,  # 4 to 5 each
    "tests/model/insight/test_eval_emulation.py::test_q8_0_is_for_all_that_is_quantized": 0,  # 7 and 10
    "tests/model/insight/test_eval_emulation.py::test_int8_is_for_what_is_in_int8": 0,  # 10
    "tests/model/insight/test_eval.py::test_one_tensor_is_exchanged_and_no_other_is_read_again": 0,  # 9 each
    "tests/model/insight/test_eval.py::test_perplexity_and_divergence_are_those_of_transformers[jax]": 0,  # 15
    "tests/model/quantize/test_quantized_models.py::test_logits_are_within_the_composed_bound": 0,  # 16
    "tests/model/quantize/test_quantized_models.py::test_logits_of_a_quantized_model": 0,  # 9
    "tests/model/quantize/test_quantized_models.py::test_both_backends_tell_the_same_story": 0,  # 4 to 6 each
    "tests/model/test_cache_int8.py::test_both_backends_tell_the_same_story": 0,  # 5
    "tests/model/test_cache_int8.py::test_logits_are_those_of_the_reference_s_cache": 0,  # 5
    "tests/model/chat/test_chat.py::test_what_a_conversation_left_in_the_cache_is_what_its_tokens_make_one_by_one": 1,  # 8 each
    "tests/model/insight/test_checkup.py::test_a_damage_that_a_text_shows_is_named_and_nothing_else": 1,  # 8 to 15 each
    "tests/model/insight/test_checkup.py::test_a_tied_flag_against_the_weights": 0,  # 13
    "tests/benchmarks/test_schemes.py::test_every_form_is_judged": 0,  # 13
    "tests/benchmarks/test_schemes.py::test_what_is_decoded_lies_in_memory_as_a_loaded_model_does": 0,  # 10
    "tests/model/quantize/test_calibration.py::test_four_bits_cost_the_built_in_model_less": 0,  # 21
    "tests/model/quantize/test_calibration.py::test_four_bits_cost_stories260k_less": 0,  # 8
    "tests/model/quantize/test_calibration.py::test_both_backends_tell_the_same_story_with_a_model_that_was_converted": 0,  # 18
    "tests/model/quantize/test_calibration.py::test_in_a_model_no_error_is_above_that_of_rounding_to_nearest": 0,  # 4 to 7 each
    "tests/model/quantize/test_calibration.py::test_a_calibrated_model_is_written_and_read": 0,  # 4 each
    "tests/learn/test_lab.py::test_broken_is_refused_and_mended_is_accepted": 2,  # 2 each, some 14
    "tests/model/quantize/test_calibration.py::test_tensors_are_the_same_whenever_they_are_read": 1,  # 3 each
    "tests/benchmarks/test_bench.py::test_random_weights_are_numbers_in_every_scheme": 1,  # 1 to 2 each
    "tests/model/tokenizers/test_tokenizers.py::test_long_texts": 1,  # 1 to 2 each
    "tests/training/test_training.py::test_bfloat16_learns_too": 0,  # 4
    "tests/model/ops/test_quantized_products.py::test_a_product_on_a_cpu_leaves_partial_sums_in_memory_and_no_copy": 8,  # 24 in 9
    "tests/learn/test_trace.py::test_distances_are_those_of_the_walk_and_the_logits_those_of_the_reference": 3,  # 7 in 6
    "tests/model/quantize/test_quantized_models.py::test_a_model_that_is_written_quantized_runs_as_one_that_is_quantized_at_load": 1,
    "tests/model/checkpoints/test_checkpoint_writing.py::test_hugging_face_goes_there_and_back": 15,  # 45 in 3
    "tests/model/families/test_family_goldens.py::test_a_golden_sees_every_switch_of_its_family": 9,  # 25 in 2
    "tests/model/checkpoints/gguf/test_gguf_writing.py::test_a_model_goes_there_and_back": 18,  # 36 in 2
    "tests/model/families/test_family_goldens.py::test_written_for_transformers_it_is_the_same_model": 13,  # 25 in 2
    "tests/model/families/test_family_goldens.py::test_gguf_holds_the_same_model_or_the_switch_is_named": 13,  # 25 in 1
    # Several devices and processes: one test of each kind stays.
    "tests/model/parallel/test_parallel_commands.py::test_what_is_measured_is_planned_with_and_what_cannot_be_is_refused": 0,  # 10
    "tests/model/parallel/test_parallel.py::test_a_story_does_not_depend_on_the_number_of_devices": 0,  # 31
    "tests/model/parallel/test_parallel_commands.py::test_the_commands_of_the_page_do_what_it_says": 0,  # 24
    "tests/model/parallel/test_parallel.py::test_every_op_of_more_models_is_within_the_bound": 0,  # 63
    "tests/model/parallel/test_parallel.py::test_a_family_without_bounds_has_the_logits_of_its_definition": 0,  # 4
    "tests/model/parallel/test_parallel.py::test_an_answer_of_the_engine_is_the_same_alone_and_in_company_on_several_devices": 0,  # 8
    "tests/model/parallel/test_parallel.py::test_a_mistake_is_found": 0,  # 16
    "tests/model/parallel/test_parallel.py::test_a_gradient_is_that_of_one_device": 0,  # 24
    "tests/model/parallel/test_parallel.py::test_a_cache_on_several_devices_gives_the_logits_of_one": 0,  # 15
    "tests/model/parallel/test_parallel.py::test_a_training_that_was_killed_ends_with_the_same_bits": 0,  # 18
    "tests/model/parallel/test_parallel.py::test_every_device_draws_the_token_that_one_draws": 0,  # 8
    "tests/model/parallel/test_parallel_processes.py::test_two_processes_tell_the_text_of_one": 0,  # 15
    "tests/model/parallel/test_parallel_processes.py::test_two_processes_train_the_weights_that_two_devices_train": 0,  # 20
    "tests/model/parallel/test_parallel_processes.py::test_the_end_of_one_process_ends_the_other_with_one_line": 1,  # 15 each
    "tests/model/parallel/test_parallel_processes.py::test_a_process_that_hangs_is_noticed": 0,  # 20 each
    "tests/model/parallel/test_parallel_processes.py::test_a_process_that_never_comes_is_named_by_its_place": 0,  # 10
    "tests/model/parallel/test_parallel_processes.py::test_a_process_reads_its_part_of_a_file": 0,  # 25
    "tests/model/parallel/test_parallel_processes.py::test_a_process_takes_the_memory_of_its_share": 0,  # 20
    "tests/model/parallel/test_parallel_processes.py::test_a_conversation_and_an_evaluation_are_those_of_one_process": 0,  # 30
    # The built-in model and its corpus, which rarely change.
    "tests/model/test_stories_model.py::test_it_is_small_and_the_one_that_the_card_describes": 0,  # 18
    "tests/model/test_stories_model.py::test_nine_more_stories_are_nine_stories": 0,  # 14
    "tests/model/test_stories_model.py::test_transformers_reads_the_same_directory": 0,  # 9
    "tests/model/test_stories_model.py::test_the_same_story_byte_for_byte[reference]": 0,  # 5
    "tests/training/test_corpus.py": 0,  # 40 in all
}
