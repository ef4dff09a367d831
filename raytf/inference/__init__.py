"""The trained model: architecture, export, versions, SavedModel, serving on Ray Serve, prediction on Ray Data.

Uses checkpoint and runs, from which it exports, but not training or the driver. Entries: `raytf.inference.export`,
`raytf.inference.serving.application` and `raytf.inference.batch.predict`.
"""
